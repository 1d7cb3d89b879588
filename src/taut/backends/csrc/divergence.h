/* The matched loss of float32 samples, whose z is at hand in float64: B(y‖z) as a sum of terms that are
 * never negative, so that float32 has the digits. With h(a) = (1 + a) log(1 + a) − a it is
 * z h((y − z)/z) for exp, that and its mirror image at the other end for sigmoid and tanh. */
#ifndef TAUT_DIVERGENCE_H
#define TAUT_DIVERGENCE_H

#include "gradient.h"
#include "single.h"

#define FLAT 16.0f   /* |u| from which 1 − z is taken from u: z has no digits of it */
#define MOST_U 80.0  /* |u| up to which float32 holds z and 1 − z */
#define MOST_TIMES 1e30 /* of z that y may be, with its logarithm within float32 */

/* h(a), where 1 + a is `whole`: by the series of log(1 + a) = 2 artanh(a/(2 + a)), without cancellation
 * where a is small */
INLINE singles excess(singles a, singles whole) {
    typedef uint32_t words __attribute__((vector_size(8 * LANES)));
    words word = (words)whole + (0x3f800000 - 0x3f3504f3);
    singles n = __builtin_convertvector((flags)(word >> 23) - 127, singles);
    flags close = n == 0.0f;
    singles f = pick(close, a, (singles)((word & 0x7fffff) + 0x3f3504f3) - 1.0f);
    singles s = f / (2.0f + f), t = s * s;
    singles q = 1.0f / 3.0f + t * (1.0f / 5.0f + t * (1.0f / 7.0f + t * (1.0f / 9.0f + t * (1.0f / 11.0f))));
    singles logarithm = n * 0x1.62e43p-1f + 2.0f * (s + s * t * q);
    singles found = pick(close, s * f * (1.0f + (s + t) * q), whole * logarithm - a);
    return pick(whole > 0x1p-126f, found, every(1.0f));
}

INLINE singles not_below(singles x, float low) { return pick(x > low, x, every(low)); }

/* B(y‖z) of outputs k and l, in the halves; y is in the closed range */
INLINE singles divergence(Kind kind, const Work *x, const lanes *y, int64_t k, int64_t l) {
    const lanes one = y[k] - x->z[k], two = y[l] - x->z[l];
    const singles by = narrowed(one, two);
    if (kind == LINEAR) return narrowed(0.5 * one * one, 0.5 * two * two);
    if (kind == EXP) {
        singles z = narrowed(x->z[k], x->z[l]), a = not_below(by / z, -1.0f);
        return z * excess(a, 1.0f + a);
    }
    const float span = kind == TANH ? 2.0f : 1.0f; /* of the range, and the factor of u in the slope */
    const double low = kind == TANH ? 1.0 : 0.0;
    const mask up[2] = {x->u[k] >= 0.0, x->u[l] >= 0.0};
    /* To the nearer end of the range, of z and of y */
    singles near = narrowed(choose(up[0], 1.0 - x->z[k], low + x->z[k]),
                            choose(up[1], 1.0 - x->z[l], low + x->z[l]));
    singles target = narrowed(choose(up[0], 1.0 - y[k], low + y[k]), choose(up[1], 1.0 - y[l], low + y[l]));
    singles u = narrowed(x->u[k], x->u[l]), size = span * size_of(u);
    flags flat = size > FLAT;
    singles out = pick(u >= 0.0f, by, -by), inward = -out / near, whole = 1.0f + inward;
    if (some(flat)) {
        singles e = exponential_single(-size);
        near = pick(flat, span * e / (1.0f + e), near);
        whole = pick(flat, target / near, whole);
        inward = pick(flat, whole - 1.0f, inward);
    }
    singles far = span - near, a = not_below(out / far, -1.0f);
    inward = not_below(inward, -1.0f);
    return (far * excess(a, 1.0f + a) + near * excess(inward, whole)) / span;
}

/* ΣB(y‖z) + yᵀ(u − v) − bᵀλ, which is Σψ(y) − yᵀv − bᵀλ + Σφ(u); NaN for y beyond the range */
PART lanes matched_loss_single(const Plan *p, const Work *x, const lanes *y) {
    lanes loss = all(0.0), largest = all(0.0);
    mask within = loss == loss, usual = within;
    for (int64_t k = 0; k < p->given; k++) {
        const Kind kind = p->kind[k];
        const double low = kind == TANH ? -1.0 : kind == LINEAR ? -INFINITY : 0.0;
        const double high = kind == SIGMOID || kind == TANH ? 1.0 : INFINITY;
        const mask held = x->held & is_infinite(x->u[k]);
        lanes part = y[k] * (x->u[k] - x->v[k]), size = absolute(x->u[k]);
        if (any(held)) { /* it is left out: see matched_loss */
            part = choose(held, taken_by(p, x, k), part);
            size = choose(held, all(0.0), size);
        }
        if (p->plain[k]) within &= (y[k] >= low) & (y[k] <= high) & (absolute(y[k]) < INFINITY);
        loss += part;
        if (kind != LINEAR) largest = larger(largest, (kind == TANH ? 2.0 : 1.0) * size);
        if (kind == EXP) usual &= held | (y[k] <= MOST_TIMES * x->z[k]);
        usual &= all(p->plain[k]) != 0.0;
    }
    usual &= largest <= MOST_U;
    for (int64_t i = 0; i < p->rows; i++) loss -= x->b[i] * x->multipliers[i];
    for (int64_t k = 0; k < p->given;) {
        const int two = k + 1 < p->given && p->kind[k] == p->kind[k + 1];
        singles found = divergence(p->kind[k], x, y, k, k + two);
        loss += choose(x->held & is_infinite(x->u[k]), all(0.0), widened(found, 0));
        if (two) loss += choose(x->held & is_infinite(x->u[k + 1]), all(0.0), widened(found, 1));
        k += 1 + two;
    }
    loss = choose(within, loss, all(NAN));
    return any(~usual) ? choose(usual, loss, matched_loss(p, x, y, 1)) : loss;
}

#endif
