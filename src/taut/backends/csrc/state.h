/* Where the samples of a block are: all there is to know at their multipliers. */
#ifndef TAUT_STATE_H
#define TAUT_STATE_H

#include <stdlib.h>

#include "products.h"
#include "stable.h"

/* benchmarks/where_time_goes.py compiles this with a clock in it, for one thread. */
enum { ACTIVATION, PRODUCTS, HESSIAN, FACTORISATION, LINE_SEARCH, ALL, PARTS };
#ifdef TAUT_PROFILE
extern uint64_t taut_ticks[PARTS];
#define TIMED(part, call)                              \
    do {                                               \
        uint64_t start = __builtin_ia32_rdtsc();       \
        call;                                          \
        taut_ticks[part] += __builtin_ia32_rdtsc() - start; \
    } while (0)
#define TIMED_AS_ONE(part, call)                       \
    do {                                               \
        uint64_t before[PARTS];                        \
        memcpy(before, taut_ticks, sizeof before);     \
        uint64_t start = __builtin_ia32_rdtsc();       \
        call;                                          \
        memcpy(taut_ticks, before, sizeof before);     \
        taut_ticks[part] += __builtin_ia32_rdtsc() - start; \
    } while (0)
#else
#define TIMED(part, call) call
#define TIMED_AS_ONE(part, call) call
#endif

#define FAR 1e-3

typedef struct {
    lanes *v, *u, *z, *w;                                /* outputs */
    lanes *low, *high;                                   /* where z may be, if any are held */
    lanes *b, *residual, *multipliers, *step, *trial;    /* rows */
    lanes *y;                                            /* the longer of the two */
    lanes *gram, *diagonal;                              /* lower triangle by rows; 1/its diagonal */
    lanes *out;  /* rows: 1 where a sample leaves it out, */
    int apart;   /* if each has its own that it does */
    lanes relative, reach;
    mask held; /* has v an infinite entry, which holds its output at an end of the range? */
    Sample sample; /* one at a time, for derivatives; room for it is made when it is needed */
    void *sample_memory;
} Work;

/* Room for one thread; NULL where there is none. */
static void *make_room(const Plan *p, Work *x) {
    int64_t outputs = p->outputs, rows = p->rows, longest = outputs > rows ? outputs : rows;
    int64_t gram = p->inverse ? 0 : triangle(p->kept);
    lanes **parts[] = {&x->v,        &x->u,           &x->z,    &x->w,     &x->b, &x->residual,
                       &x->multipliers, &x->step, &x->trial, &x->y, &x->gram, &x->diagonal,
                       &x->out, &x->low, &x->high};
    int64_t sizes[] = {outputs, outputs, outputs, outputs, rows, rows,
                       rows,    rows,    rows,    longest, gram, p->kept,
                       rows,    outputs, outputs};
    int64_t total = 0;
    for (int i = 0; i < 15; i++) total += sizes[i] + GAP;
    char *memory = malloc((total + 1) * sizeof(lanes));
    x->sample_memory = NULL;
    if (!memory) return NULL;
    lanes *at = (lanes *)(((uintptr_t)memory + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes));
    for (int i = 0; i < 15; i++, at += GAP) {
        *parts[i] = at;
        at += sizes[i];
        GUARD(at);
    }
    return memory;
}

/* Where does Newton work with row i? Those left out are behind the others, or each sample has its own. */
INLINE mask is_kept(const Plan *p, const Work *x, int64_t i) {
    return x->apart ? x->out[i] == 0.0 : all(i < p->kept) != 0.0;
}

/* The residual over |b| + share·|A||z|; `roughly` with what |A||z| can be at most instead. Else
 * |z| is in y, or z itself where no a·z is negative. Equations left out are as exact as the b of
 * those that imply them: their part is over |b| + |A||z|, times `implied`. */
INLINE lanes measure(const Plan *p, Work *x, double share, double implied, int roughly, lanes most) {
    lanes largest = all(0.0), terms[TILE];
    for (int64_t i = 0; i < p->rows; i += TILE) {
        if (!roughly) apply(p, p->positive ? x->z : x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            lanes size = roughly ? p->sizes[i + t] * most : terms[t];
            mask kept = is_kept(p, x, i + t);
            lanes scale = absolute(x->b[i + t]) + choose(kept, all(share), all(1.0)) * size;
            scale = at_most(at_least(scale, all(0x1p-1022)), all(0x1.fp997));
            lanes part = absolute(x->residual[i + t]) / scale;
            largest = larger(largest, choose(kept, part, implied * part));
        }
    }
    return largest;
}

/* u, and how far it has moved where σ bends */
INLINE lanes predict(const Plan *p, Work *x) {
    lanes reach = all(0.0), sum[TILE];
    mask moved = all(0.0) != all(0.0);
    for (int64_t i = 0; i < p->kept; i++) moved |= x->multipliers[i] != 0.0;
    const int from_zero = !any(moved);
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        if (!from_zero) adjoint(p, x->multipliers, k, sum);
        for (int t = 0; t < TILE; t++) {
            lanes u = x->v[k + t] + (from_zero ? all(0.0) : sum[t]);
            reach = farther_at(p, k + t, reach, u - x->u[k + t]); /* ∞ − ∞ where held */
            x->u[k + t] = u;
        }
    }
    return reach;
}

/* z and w; returns the largest |z| */
INLINE lanes activate_outputs(const Plan *p, Work *x) {
    lanes most = all(0.0);
    for (int64_t k = 0; k < p->outputs; k++) {
        Output out = activate_output(p, k, x->u[k]);
        x->z[k] = out.z;
        x->w[k] = out.slope;
        most = larger(most, absolute(out.z));
    }
    if (any(x->held)) set_ends(p, x->u, x->z);
    return most;
}

INLINE void sizes_of_outputs(const Plan *p, Work *x) {
    for (int64_t k = 0; k < p->outputs && !p->positive; k++) x->y[k] = absolute(x->z[k]);
}

/* What the part of equations left out counts: see measure */
INLINE double implied(const Solve *s) {
    const double enough = s->single || s->cap < 1e-13 ? s->cap : 1e-13;
    return s->target < enough ? s->target / enough : 1.0;
}

/* The residual and its size */
INLINE void compare(const Plan *p, const Solve *s, Work *x, lanes most) {
    lanes sum[TILE];
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->z, i, 1, sum);
        for (int t = 0; t < TILE; t++) x->residual[i + t] = sum[t] - x->b[i + t];
    }
    x->relative = measure(p, x, s->share, implied(s), 1, most);
    /* In truth it is no less. Where that is clearly too much, it need not be known better. */
    mask far = x->relative > (s->target > FAR ? s->target : FAR);
    if (!any(~far)) return;
    sizes_of_outputs(p, x);
    x->relative = choose(far, x->relative, measure(p, x, s->share, implied(s), 0, most));
}

/* Everything at the multipliers */
PART void evaluate(const Plan *p, const Solve *s, Work *x) {
    lanes most;
    TIMED(PRODUCTS, x->reach = predict(p, x));
    TIMED(ACTIVATION, most = activate_outputs(p, x));
    TIMED(PRODUCTS, compare(p, s, x, most));
}

/* w(|u| + |v|): what z has of their rounding. A held output has none, and 0·∞ is NaN. */
INLINE lanes rounded(const Work *x, int64_t k) {
    lanes size = x->w[k] * (absolute(x->u[k]) + absolute(x->v[k]));
    return choose(x->held & is_infinite(x->v[k]), all(0.0), size);
}

/* The residual against the size of what is rounded in it: rounding_scale of solvers/base.py. */
PART void level(const Plan *p, Work *x, lanes *to) {
    lanes largest = all(0.0), terms[TILE];
    for (int64_t k = 0; k < p->outputs; k++) x->y[k] = absolute(x->z[k]) + rounded(x, k);
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            lanes scale = at_least(absolute(x->b[i + t]) + terms[t], all(0x1p-1022));
            largest = larger(largest, absolute(x->residual[i + t]) / scale);
        }
    }
    *to = largest;
}

/* Does all that is to be returned fit the dtype? Then also |A||z|, whose size is asked for. */
INLINE mask fits(const Plan *p, const Solve *s, Work *x) {
    lanes largest = all(0.0), terms[TILE];
    for (int64_t i = 0; i < p->kept; i++) largest = larger(largest, absolute(x->multipliers[i]));
    for (int64_t k = 0; k < p->outputs; k++) {
        lanes u = absolute(x->u[k]);
        if (any(x->held)) u = choose(is_infinite(x->v[k]), all(0.0), u); /* it stays infinite */
        x->y[k] = absolute(x->z[k]);
        largest = larger(largest, larger(x->y[k], u));
    }
    mask fine = largest <= s->huge;
    double most = 0.0;
    for (int64_t i = 0; i < p->rows; i++) most = p->sizes[i] > most ? p->sizes[i] : most;
    mask near = ~(most * largest <= s->huge);
    for (int64_t i = 0; any(near) && i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) fine &= ~near | (terms[t] <= s->huge);
    }
    return fine;
}

#endif
