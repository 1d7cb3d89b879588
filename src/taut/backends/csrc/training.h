/* A training step: solve, matched loss, its gradient, and the memory, in one call. */
#ifndef TAUT_TRAINING_H
#define TAUT_TRAINING_H

#include "divergence.h"
#include "newton.h"

/* λ of all samples into the memory, and the sum of the losses: by the thread that ends last, when
 * nobody reads the memory any more. A sample that comes twice leaves its last λ. */
static void finish_training(const Plan *p, Train *t) {
    const Solve *s = t->solve;
    const int64_t bytes = p->constraints * (s->single ? 4 : 8);
    if (s->unsolved) return;
    t->total = 0.0;
    for (int64_t n = 0; n < s->samples; n++) t->total += number(t->loss, n, s->single);
    if (!(t->total - t->total == 0.0)) return; /* NaN, or infinite */
    t->unsolved = 0;
    for (int64_t n = 0; t->table && n < s->samples; n++)
        memcpy((char *)t->table + s->index[n] * bytes, (char *)s->multipliers + n * bytes, bytes);
}

/* Are so many samples in the memory? */
static int remembered(const Train *t, int64_t first, int64_t count) {
    for (int64_t n = first; t->table && n < first + count; n++)
        if (t->solve->index[n] < 0 || t->solve->index[n] >= t->entries) return 0;
    return 1;
}

/* Loss, gradient and λ of the samples in `which` */
PART void write_training(const Plan *p, Train *t, Work *x, int64_t first, mask which) {
    const Solve *s = t->solve;
    read_outputs(p, x->y, t->y, first, s->samples, s->single);
    lanes loss = s->single ? matched_loss_single(p, x, x->y) : matched_loss(p, x, x->y, 0);
    for (int64_t k = 0; k < p->given; k++) {
        lanes z = x->z[k];
        if (s->single) /* as it would be returned */
            z = __builtin_convertvector(__builtin_convertvector(z, floats), lanes);
        x->w[k] = choose(is_infinite(x->v[k]), all(0.0), t->scale * (z - x->y[k]));
    }
    write_outputs_of(p, x->w, t->dv, first, s->samples, s->single, which);
    write_rows_of(p, x->multipliers, s->multipliers, first, s->samples, s->single, which);
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        if (which[l]) put(t->loss, first + l, s->single, loss[l]);
}

#endif
