/* The solve in float32, twice as many samples side by side: σ, products, A diag(w) Aᵀ, its factor. It
 * need not be exact: mixed.h ends in float64. */
#ifndef TAUT_SINGLE_H
#define TAUT_SINGLE_H

#include "abreast.h"
#include "state.h"

typedef union {
    singles whole;
    floats half[2];
} Halves;

/* Where there is a shuffle for it: through memory, the whole would wait until both halves are there. */
INLINE singles narrowed(lanes one, lanes two) {
    floats x = __builtin_convertvector(one, floats), y = __builtin_convertvector(two, floats);
#ifdef SIDE_BY_SIDE
    return __builtin_shufflevector(x, y, SIDE_BY_SIDE);
#else
    return (Halves){.half = {x, y}}.whole;
#endif
}
INLINE lanes widened(singles x, int half) {
    Halves found = {x};
    return __builtin_convertvector(found.half[half], lanes);
}
INLINE mask widened_flags(flags x, int half) {
    return widened(pick(x, every(1.0f), every(0.0f)), half) > 0.0;
}
INLINE flags narrowed_flags(mask one, mask two) {
    lanes yes = all(1.0), no = all(0.0);
    return narrowed(choose(one, yes, no), choose(two, yes, no)) > 0.0f;
}

/* e^x for x ≤ 88, no less than the smallest normal number */
INLINE singles exponential_single(singles x) {
    const singles shift = every(0x1.8p23f);
    x = most_of(every(-87.0f), x);
    singles t = x * 0x1.715476p+0f + shift, n = t - shift;
    singles r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    singles p = every(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    typedef uint32_t words __attribute__((vector_size(8 * LANES)));
    return p * (singles)(((words)t + 127) << 23);
}

typedef struct {
    singles z, slope;
} Narrow;

INLINE Narrow activate_single(Kind kind, singles x) {
    singles e, r;
    switch (kind) {
    case EXP:
        e = exponential_single(-most_of(every(-88.0f), -x));
        e = pick(x > 88.0f, every(INFINITY), e);
        return (Narrow){e, e};
    case SIGMOID:
        e = exponential_single(-size_of(x));
        r = 1.0f / (1.0f + e);
        return (Narrow){pick(x >= 0.0f, r, e * r), e * r * r};
    case TANH:
        e = exponential_single(-2.0f * size_of(x));
        r = 1.0f / (1.0f + e);
        return (Narrow){pick(x >= 0.0f, r - e * r, e * r - r), 4.0f * e * r * r};
    default:
        return (Narrow){x, every(1.0f)};
    }
}

INLINE Narrow activate_output_single(const Plan *p, int64_t k, singles u) {
    if (p->plain[k]) return activate_single(p->kind[k], u);
    const float scale = (float)p->scale[k], shift = (float)p->shift[k];
    const float inverse = (float)(1.0 / p->temperature[k]);
    Narrow out = activate_single(p->kind[k], u * inverse);
    out.z = shift + scale * out.z;
    out.slope *= scale * inverse;
    return out;
}

/* σ''/σ' at z */
INLINE singles curvature(const Plan *p, int64_t k, singles z) {
    const float inverse = (float)(1.0 / p->temperature[k]);
    if (p->kind[k] == LINEAR) return every(0.0f);
    if (p->kind[k] == EXP) return every(inverse);
    z = (z - (float)p->shift[k]) * (float)(1.0 / p->scale[k]);
    return (p->kind[k] == SIGMOID ? 1.0f - 2.0f * z : -2.0f * z) * inverse;
}

/* Four sums, or every addition would wait for the one before */
INLINE singles dot_single(int64_t n, const singles *x, const singles *y) {
    singles sum[4] = {every(0.0f), every(0.0f), every(0.0f), every(0.0f)};
    int64_t i = 0;
    for (; i + 3 < n; i += 4)
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) sum[t] += x[i + t] * y[i + t];
    for (; i < n; i++) sum[0] += x[i] * y[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* K Σw²/(Σw)² − 1 */
INLINE singles unevenness(const Plan *p, const singles *w) {
    singles sum = every(0.0f), squares = sum;
    for (int64_t k = 0; k < p->given; k++) {
        sum += w[k];
        squares += w[k] * w[k];
    }
    return (float)p->given * squares / (sum * sum) - 1.0f;
}

/* A group: all there is to know of it in float32. Arrays are filled up to a multiple of SPAN. */
typedef struct {
    singles *v, *u, *z, *w;                        /* outputs; in the end what u and z have moved by */
    singles *d, *t, *last;                         /* of steps: see steps.h */
    singles *at;                                   /* the slopes that the factor is of */
    singles *multipliers, *b, *r, *p, *y, *before; /* rows; `before` is r of the step before */
    singles *gone;                                 /* Σ of what the multipliers are to move along p */
    singles *scale;                                /* of the residual: one over its size */
    singles *gram, *diagonal;
    singles relative;
} Group;

INLINE int64_t tiled(int64_t n) { return (n + 2) / 3 * 3; }

static void *make_group(const Plan *p, Group *x) {
    const int64_t K = spans(p->given), I = spans(p->worked), n = tiled(p->worked);
    singles **parts[] = {&x->v, &x->u, &x->z,      &x->w,    &x->d,    &x->t,
                         &x->last, &x->at, &x->multipliers, &x->b, &x->r, &x->p,
                         &x->y, &x->before, &x->gone, &x->scale, &x->gram, &x->diagonal};
    int64_t sizes[] = {K, K, K, K, K, K, K, K, I, I, I, I, I, I, I, I, spans(triangle(n)), n}, total = 0;
    for (int i = 0; i < 18; i++) total += sizes[i] + GAP;
    char *memory = malloc((total + 1) * sizeof(singles));
    if (!memory) return NULL;
    singles *at = (singles *)(((uintptr_t)memory + sizeof *at - 1) / sizeof *at * sizeof *at);
    for (int i = 0; i < 18; i++, at += GAP) {
        *parts[i] = at;
        at += sizes[i];
        GUARD(at);
    }
    return memory;
}

/* u moves by `by` along d; z and σ' are those there. Returns the largest |z|, and zᵀd. */
INLINE singles move_outputs(const Plan *p, Group *x, singles by, singles *along, const int64_t kind) {
    singles most = every(0.0f), sum = most;
    for (int64_t k = 0; k < p->given; k++) {
        const singles d = x->d[k], u = x->u[k] + by * d;
        Narrow out = kind < 0 ? activate_output_single(p, k, u) : activate_single((Kind)kind, u);
        x->u[k] = u;
        x->z[k] = out.z;
        x->w[k] = out.slope;
        most = most_of(size_of(out.z), most);
        sum += out.z * d;
    }
    *along = sum;
    return most;
}

/* Likewise, by code of its own where all outputs have one σ */
PART singles move_by(const Plan *p, Group *x, singles by, singles *along) {
    switch (p->uniform) {
    case EXP: return move_outputs(p, x, by, along, EXP);
    case SIGMOID: return move_outputs(p, x, by, along, SIGMOID);
    case TANH: return move_outputs(p, x, by, along, TANH);
    default: return move_outputs(p, x, by, along, -1);
    }
}

/* A z − b, of A z in r, and its size */
PART void compare_single(const Plan *p, Group *x, singles most) {
    singles relative = every(0.0f);
    for (int64_t i = 0; i < p->worked; i++) {
        const singles r = x->r[i] - x->b[i], part = size_of(r) / (size_of(x->b[i]) + p->shares[i] * most);
        relative = pick(part == part, most_of(part, relative), every(INFINITY));
        x->r[i] = r;
    }
    x->relative = relative;
}

/* A diag(at) Aᵀ as one product with the a_ik·a_jk, and its factor as in factor.h, 3×3 sums at a time.
 * Returns where it is safe. */
PART flags factorise_single(const Plan *p, Group *x) {
    const int64_t n = tiled(p->worked);
    singles *gram = x->gram, *diagonal = x->diagonal;
    for (int64_t e = 0; e < triangle(n); e += SPAN)
        product(p->pairs + e * p->given, SPAN, x->at, x->at, p->given, gram + e, gram + e, SPAN, 0);
    for (int64_t i = p->worked; i < n; i++) gram[triangle(i) + i] = every(1.0f);
    for (int64_t i = 0; i < n; i++) diagonal[i] = gram[triangle(i) + i];
    flags fine = gram[0] == gram[0];
    for (int64_t j = 0; j < n; j += 3)
        for (int64_t i = j; i < n; i += 3) {
            singles sum[3][3], *row[3], *column[3];
#pragma GCC unroll 3
            for (int s = 0; s < 3; s++) {
                row[s] = gram + triangle(i + s);
                column[s] = gram + triangle(j + s);
#pragma GCC unroll 3
                for (int t = 0; t < 3; t++) sum[s][t] = every(0.0f);
            }
            for (int64_t k = 0; k < j; k++)
#pragma GCC unroll 3
                for (int s = 0; s < 3; s++)
#pragma GCC unroll 3
                    for (int t = 0; t < 3; t++) sum[s][t] += row[s][k] * column[t][k];
#pragma GCC unroll 3
            for (int s = 0; s < 3; s++)
#pragma GCC unroll 3
                for (int t = 0; t < 3; t++) {
                    if (j + t > i + s) continue;
                    singles y = row[s][j + t] - sum[s][t];
                    for (int k = 0; k < t; k++) y -= row[s][j + k] * column[t][j + k];
                    if (i + s > j + t) {
                        row[s][j + t] = y * diagonal[j + t];
                        continue;
                    }
                    flags safe = (y > 3e-6f * diagonal[i + s]) & (y > 1e-30f);
                    fine &= safe;
                    y = pick(safe, y, every(1.0f));
                    for (int l = 0; l < SAMPLES; l++) diagonal[i + s][l] = 1.0f / sqrtf(y[l]);
                }
        }
    return fine;
}

/* x ← (A diag(at) Aᵀ)⁻¹ x */
PART void solve_single(const Plan *p, const Group *g, singles *x) {
    const int64_t n = p->worked;
    for (int64_t i = 0; i < n; i++) {
        const singles *row = g->gram + triangle(i);
        singles sum[4] = {every(0.0f), every(0.0f), every(0.0f), every(0.0f)};
        int64_t k = 0;
        for (; k + 3 < i; k += 4)
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) sum[t] += row[k + t] * x[k + t];
        for (; k < i; k++) sum[0] += row[k] * x[k];
        x[i] = (x[i] - ((sum[0] + sum[1]) + (sum[2] + sum[3]))) * g->diagonal[i];
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        const singles *row = g->gram + triangle(i);
        singles found = x[i] *= g->diagonal[i];
        for (int64_t k = 0; k < i; k++) x[k] -= row[k] * found;
    }
}

#endif
