/* Eight samples side by side: a `lanes` holds one number of each. */
#ifndef TAUT_LANES_H
#define TAUT_LANES_H

#include <math.h>
#include <stdint.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

#define PART static __attribute__((noinline))

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t mask __attribute__((vector_size(8 * LANES))); /* −1 is true */

INLINE lanes all(double x) { return (lanes){x, x, x, x, x, x, x, x}; }
INLINE lanes choose(mask m, lanes yes, lanes no) {
    return (lanes)((m & (mask)yes) | (~m & (mask)no));
}
INLINE lanes absolute(lanes x) { return (lanes)((mask)x & INT64_MAX); }
/* NaN stays. */
INLINE lanes at_least(lanes x, lanes low) { return choose(x < low, low, x); }
INLINE lanes at_most(lanes x, lanes high) { return choose(x > high, high, x); }
INLINE lanes larger(lanes x, lanes y) { return choose((x >= y) | (x != x), x, y); }

/* x = n·log 2 + r with |r| ≤ log(2)/2; returns e^r − 1, and 2^n as the product of two factors,
 * each of which is a number where their product is not. */
INLINE lanes reduced(lanes x, lanes *half, lanes *rest) {
    const lanes shift = all(0x1.8p52); /* adding it rounds to an integer, in the low bits */
    x = at_most(at_least(x, all(-746.0)), all(710.0));
    lanes t = x * 0x1.71547652b82fep+0 + shift;
    lanes n = t - shift;
    lanes r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    mask k = (mask)t - (mask)shift, first = k >> 1;
    *half = (lanes)((first + 1023) << 52);
    *rest = (lanes)((k - first + 1023) << 52);
    lanes p = all(1.0 / 6227020800.0);
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    return p * r * r + r;
}

INLINE lanes exponential(lanes x) {
    lanes half, rest, p = reduced(x, &half, &rest);
    return (p + 1.0) * half * rest;
}

/* e^x − 1 for x ≤ 0 */
INLINE lanes exponential_less_one(lanes x) {
    lanes half, rest, p = reduced(x, &half, &rest);
    return p * half * rest + (half * rest - 1.0);
}

typedef enum { EXP, SIGMOID, TANH, LINEAR } Kind;

/* z = σ(x) and its derivative, which keeps its digits where σ has saturated */
INLINE void activate(Kind kind, lanes x, lanes *z, lanes *slope) {
    lanes e;
    *z = *slope = x;
    switch (kind) {
    case EXP:
        *z = *slope = exponential(x);
        break;
    case SIGMOID:
        e = exponential(-absolute(x));
        *slope = 1.0 / (1.0 + e);
        *z = choose(x >= 0.0, *slope, e * *slope);
        *slope *= e * *slope;
        break;
    case TANH:
        e = exponential_less_one(-2.0 * absolute(x)); /* tanh|x| = −e/(2 + e) */
        *slope = 1.0 / (2.0 + e);
        *z = -e * *slope;
        *z = choose(x >= 0.0, *z, -*z);
        *slope *= 4.0 * (e + 1.0) * *slope;
        break;
    case LINEAR:
        *slope = all(1.0);
    }
}

#endif
