/* A training step: solve, matched loss, its gradient, and the memory, in one call. */
#ifndef TAUT_TRAINING_H
#define TAUT_TRAINING_H

#include "gradient.h"
#include "newton.h"

/* λ of all samples into the memory, and the sum of the losses: by the thread that ends last, when
 * nobody reads the memory any more. A sample that comes twice leaves its last λ. */
static void finish(const Plan *p, Train *t) {
    const Solve *s = t->solve;
    const int64_t bytes = p->constraints * (s->single ? 4 : 8);
    t->total = 0.0;
    for (int64_t n = 0; n < s->samples; n++) t->total += number(t->loss, n, s->single);
    if (s->unsolved || t->total != t->total) return;
    t->unsolved = 0;
    for (int64_t n = 0; t->table && n < s->samples; n++)
        memcpy((char *)t->table + s->index[n] * bytes, (char *)s->multipliers + n * bytes, bytes);
}

/* Are these samples in the memory? */
INLINE int known(const Train *t, int64_t first) {
    const Solve *s = t->solve;
    for (int l = 0; t->table && l < LANES; l++) {
        int64_t at = s->index[sample(first, l, s->samples)];
        if (at < 0 || at >= t->entries) return 0;
    }
    return 1;
}

PART void train_block(const Plan *p, Train *t, Work *x, int64_t first) {
    Solve *s = t->solve;
    const int64_t count = first + LANES < s->samples ? LANES : s->samples - first;
    if (known(t, first)) {
        lanes iterations;
        read_block(p, s, x, first);
        mask solved = solve_lanes(p, s, x, &iterations);
        read_outputs(p, x->y, t->y, first, s->samples, s->single);
        lanes loss = matched_loss(p, x, x->y, s->single);
        for (int64_t k = 0; k < p->given; k++) {
            lanes z = x->z[k];
            if (s->single) /* as it would be returned */
                z = __builtin_convertvector(__builtin_convertvector(z, floats), lanes);
            x->w[k] = t->scale * (z - x->y[k]);
        }
        write_outputs(p, x->w, t->dv, first, s->samples, s->single);
        write_rows(p, x->multipliers, s->multipliers, first, s->samples, s->single);
        int64_t done = 0;
        for (int l = 0; l < count; l++) {
            put(t->loss, first + l, s->single, loss[l]);
            done += solved[l] != 0;
        }
        __atomic_fetch_sub(&s->unsolved, done, __ATOMIC_RELAXED);
    }
    if (__atomic_add_fetch(&t->seen, count, __ATOMIC_ACQ_REL) == s->samples) finish(p, t);
}

#endif
