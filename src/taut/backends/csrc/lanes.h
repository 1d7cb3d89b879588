/* Samples side by side: a `lanes` holds one number of each of LANES samples. LANES is set by the
 * variant, and is as many as fit a vector of the processor it is for: compilers take wider ones
 * apart, number by number. */
#ifndef TAUT_LANES_H
#define TAUT_LANES_H

#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#define PART static __attribute__((noinline))

typedef double lanes __attribute__((vector_size(8 * LANES)));
typedef int64_t mask __attribute__((vector_size(8 * LANES))); /* −1 is true */
typedef uint64_t bits __attribute__((vector_size(8 * LANES)));

INLINE lanes all(double x) { return x - (lanes){0}; } /* not x + 0, which loses the sign of −0 */
INLINE lanes choose(mask m, lanes yes, lanes no) {
    return (lanes)((m & (mask)yes) | (~m & (mask)no));
}
INLINE lanes absolute(lanes x) { return (lanes)((mask)x & INT64_MAX); }
INLINE int any(mask m) {
    int64_t found = 0;
    for (int l = 0; l < LANES; l++) found |= m[l];
    return found != 0;
}
#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (mask){__VA_ARGS__})
#endif

/* Row i, lane j becomes row j, lane i: blocks of 1, then of 2, then of 4 change places. */
INLINE void transpose(lanes *x) {
#if LANES == 8
#define ONES_LOW 0, 8, 2, 10, 4, 12, 6, 14
#define ONES_HIGH 1, 9, 3, 11, 5, 13, 7, 15
#define TWOS_LOW 0, 1, 8, 9, 4, 5, 12, 13
#define TWOS_HIGH 2, 3, 10, 11, 6, 7, 14, 15
#elif LANES == 4
#define ONES_LOW 0, 4, 2, 6
#define ONES_HIGH 1, 5, 3, 7
#define TWOS_LOW 0, 1, 4, 5
#define TWOS_HIGH 2, 3, 6, 7
#else
#define ONES_LOW 0, 2
#define ONES_HIGH 1, 3
#endif
    for (int i = 0; i < LANES; i += 2) {
        lanes a = x[i], b = x[i + 1];
        x[i] = SHUFFLE(a, b, ONES_LOW);
        x[i + 1] = SHUFFLE(a, b, ONES_HIGH);
    }
#if LANES > 2
    for (int i = 0; i < LANES; i += i % 4 ? 3 : 1) {
        lanes a = x[i], b = x[i + 2];
        x[i] = SHUFFLE(a, b, TWOS_LOW);
        x[i + 2] = SHUFFLE(a, b, TWOS_HIGH);
    }
#endif
#if LANES > 4
    for (int i = 0; i < LANES / 2; i++) {
        lanes a = x[i], b = x[i + 4];
        x[i] = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        x[i + 4] = SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#endif
}

/* NaN stays. */
INLINE lanes at_least(lanes x, lanes low) { return choose(x < low, low, x); }
INLINE lanes at_most(lanes x, lanes high) { return choose(x > high, high, x); }
INLINE lanes within(mask m, lanes x) { return choose(m, x, all(0.0)); }
INLINE lanes smaller(lanes x, lanes y) { return choose(x < y, x, y); }
INLINE lanes larger(lanes x, lanes y) { return choose((x >= y) | (x != x), x, y); }
/* The same, but a y that is NaN, as ∞ − ∞ is, is left out. */
INLINE lanes farther(lanes x, lanes y) { return choose(y > x, y, x); }
INLINE mask is_infinite(lanes x) { return absolute(x) == INFINITY; }
INLINE mask pick_mask(mask m, mask yes, mask no) { return (m & yes) | (~m & no); }

/* x = n·log 2 + r with |r| ≤ log(2)/2; returns e^r − 1, and 2^n as the product of two factors,
 * each of which is a number where their product is not. */
INLINE lanes reduced(lanes x, lanes *half, lanes *rest) {
    const lanes shift = all(0x1.8p52); /* adding it rounds to an integer, in the low bits */
    x = at_most(at_least(x, all(-746.0)), all(710.0));
    lanes t = x * 0x1.71547652b82fep+0 + shift;
    lanes n = t - shift;
    lanes r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    /* k/2 rounded down, k ≥ −1077. Without signs: AVX2 shifts no others, and of NaN's bits the
     * differences may be any number. */
    bits k = (bits)t - (bits)shift, first = ((k + 2048) >> 1) - 1024;
    *half = (lanes)((first + 1023) << 52);
    *rest = (lanes)((k - first + 1023) << 52);
    /* By pairs, or every product would wait for the one before. */
    lanes r2 = r * r, r4 = r2 * r2;
    lanes a = r * (1.0 / 6.0) + 0.5, b = r * (1.0 / 120.0) + 1.0 / 24.0;
    lanes c = r * (1.0 / 5040.0) + 1.0 / 720.0, d = r * (1.0 / 362880.0) + 1.0 / 40320.0;
    lanes e = r * (1.0 / 39916800.0) + 1.0 / 3628800.0;
    lanes f = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    lanes p = ((f * r2 + e) * r4 + (d * r2 + c)) * r4 + (b * r2 + a);
    return p * r2 + r;
}

INLINE lanes exponential(lanes x) {
    lanes half, rest, p = reduced(x, &half, &rest);
    return (p + 1.0) * half * rest;
}

/* e^x − 1, and e^x beside it */
INLINE lanes exponential_less_one(lanes x, lanes *whole) {
    lanes half, rest, p = reduced(x, &half, &rest);
    *whole = (p + 1.0) * half * rest;
    return p * half * rest + (half * rest - 1.0);
}

/* log(m·2^n) with m between √½ and √2 as in fdlibm: a polynomial in ((m − 1)/(m + 1))² */
INLINE lanes logarithm(lanes x) {
    mask tiny = x < 0x1p-1022, ordinary = (x > 0.0) & (x < INFINITY);
    lanes scaled = choose(tiny, x * 0x1p54, x);
    bits word = (bits)choose(ordinary, scaled, all(1.0)) + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
    lanes f = (lanes)((word & 0xfffffffffffff) + 0x3fe6a09e667f3bcd) - 1.0;
    /* The exponent, in the low bits of a large number, as AVX2 cannot convert 64-bit integers */
    lanes n = (lanes)((word >> 52) + 0x4330000000000000) - (0x1p52 + 1023.0);
    n -= choose(tiny, all(54.0), all(0.0));
    lanes s = f / (2.0 + f), t = s * s, half = 0.5 * f * f;
    lanes r = all(0x1.2f112df3e5244p-3);
    r = r * t + 0x1.39a09d078c69fp-3;
    r = r * t + 0x1.7466496cb03dep-3;
    r = r * t + 0x1.c71c51d8e78afp-3;
    r = r * t + 0x1.2492494229359p-2;
    r = r * t + 0x1.999999997fa04p-2;
    r = r * t + 0x1.5555555555593p-1;
    lanes low = s * (half + r * t) + n * 0x1.a39ef35793c76p-33;
    lanes found = n * 0x1.62e42feep-1 - ((half - low) - f);
    found = choose(x == 0.0, all(-INFINITY), choose(x == INFINITY, x, found));
    return choose((x < 0.0) | (x != x), all(NAN), found);
}

INLINE lanes logarithm_of_one_plus(lanes x) {
    lanes y = 1.0 + x, lost = (x - (y - 1.0)) / y; /* what rounding took from y */
    lanes found = logarithm(y);
    return choose(absolute(lost) < 1.0, found + lost, found);
}

typedef enum { EXP, SIGMOID, TANH, LINEAR } Kind;

typedef struct {
    lanes z, slope;
} Output;

/* σ(x) and its derivative, which keeps its digits where σ has saturated */
INLINE Output activate(Kind kind, lanes x) {
    lanes e, r, less;
    switch (kind) {
    case EXP:
        e = exponential(x);
        return (Output){e, e};
    case SIGMOID:
        e = exponential(-absolute(x));
        r = 1.0 / (1.0 + e);
        return (Output){choose(x >= 0.0, r, e * r), e * r * r};
    case TANH: /* (1 − e)/(1 + e) with e = exp(−2|x|), and 4e/(1 + e)² */
        less = exponential_less_one(-2.0 * absolute(x), &e);
        r = 1.0 / (1.0 + e);
        return (Output){choose(x >= 0.0, -less * r, less * r), 4.0 * e * r * r};
    default:
        return (Output){x, all(1.0)};
    }
}

/* factor·logarithm, 0 where the factor is 0 */
INLINE lanes entropy(lanes factor, lanes logarithm) {
    return factor * at_least(logarithm, all(-0x1.fp1023));
}

/* φ(x), the integral of σ */
INLINE lanes integral(Kind kind, lanes x) {
    lanes size = absolute(x), s, unused;
    switch (kind) {
    case EXP:
        return exponential(x);
    case SIGMOID:
        return at_least(x, all(0.0)) + logarithm_of_one_plus(exponential(-size));
    case TANH: /* log cosh; for small x from sinh², for large without overflow */
        s = exponential_less_one(at_most(size, all(10.0)), &unused);
        s = 0.5 * (s + s / (1.0 + s));
        return choose(size < 10.0, 0.5 * logarithm_of_one_plus(s * s),
                      size - 0x1.62e42fefa39efp-1 + logarithm_of_one_plus(exponential(-2.0 * size)));
    default:
        return 0.5 * x * x;
    }
}

/* ψ(z), the negative entropy */
INLINE lanes negative_entropy(Kind kind, lanes z) {
    switch (kind) {
    case EXP:
        return entropy(z, logarithm(z)) - z;
    case SIGMOID:
        return entropy(z, logarithm(z)) + entropy(1.0 - z, logarithm_of_one_plus(-z));
    case TANH:
        return 0.5 * (entropy(1.0 + z, logarithm_of_one_plus(z)) +
                      entropy(1.0 - z, logarithm_of_one_plus(-z)));
    default:
        return 0.5 * z * z;
    }
}

#endif
