/* The derivatives of the solve, and the matched loss. */
#ifndef TAUT_GRADIENT_H
#define TAUT_GRADIENT_H

#include "factor.h"
#include "state.h"

/* s = (A diag(w) Aᵀ)⁻¹(A g + g_λ), ∂v = g − w∘Aᵀs, with g = g_u + w∘g_z: see problems/linear.py */
PART void backward_block(const Plan *p, Backward *s, Work *x, int64_t first) {
    mask live = all(0.0) == all(0.0);
    for (int l = 0; l < LANES; l++) live[l] = -(s->status[sample(first, l, s->samples)] == 0);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    for (int64_t k = 0; k < p->outputs; k++) {
        x->u[k] = choose(live, x->u[k], all(0.0));
        x->w[k] = activate_output(p, k, x->u[k]).slope;
        x->v[k] = all(0.0);
    }
    if (s->g_u) read_outputs(p, x->v, s->g_u, first, s->samples, s->single);
    if (s->g_z) {
        read_outputs(p, x->z, s->g_z, first, s->samples, s->single);
        for (int64_t k = 0; k < p->outputs; k++) x->v[k] += x->w[k] * x->z[k];
    }
    for (int64_t k = 0; k < p->outputs; k++) x->v[k] = choose(live, x->v[k], all(0.0));
    for (int64_t i = 0; i < p->rows; i += TILE) apply(p, x->v, i, 1, x->step + i);
    if (s->g_multipliers) {
        read_rows(p, x->residual, s->g_multipliers, p->constraints, first, s->samples, s->single);
        for (int64_t i = 0; i < p->rows; i++)
            x->step[i] += choose(live, x->residual[i], all(0.0));
    }
    mask fine = live | ~live;
    if (!p->inverse) {
        form_gram(p, x->w, x->gram);
        factorise(p, x->gram, x->diagonal, s->rules->pivot, &fine);
    }
    solve_gram(p, x->gram, x->diagonal, x->step, x->y);
    for (int64_t i = 0; i < p->kept; i++) {
        fine &= absolute(x->step[i]) < INFINITY;
        x->step[i] = choose(live, x->step[i], all(0.0));
    }
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        lanes sum[TILE];
        adjoint(p, x->step, k, sum);
        for (int t = 0; t < TILE; t++) x->v[k + t] -= x->w[k + t] * sum[t];
    }
    for (int64_t k = 0; k < p->outputs; k++) x->v[k] = choose(live, x->v[k], all(0.0));
    fine |= ~live;
    for (int64_t i = 0; i < p->kept; i++) x->step[i] = choose(fine, x->step[i], all(NAN));
    write_outputs(p, x->v, s->dv, first, s->samples, s->single);
    write_rows(p, x->step, s->db, first, s->samples, s->single);
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        if (fine[l]) __atomic_fetch_sub(&s->unsolved, 1, __ATOMIC_RELAXED);
}

/* Σψ(y) − yᵀv − bᵀλ + Σφ(u): see losses.py */
PART void loss_block(const Plan *p, Loss *s, Work *x, int64_t first) {
    lanes loss = all(0.0);
    read_outputs(p, x->v, s->v, first, s->samples, s->single);
    read_outputs(p, x->z, s->y, first, s->samples, s->single);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    read_rows(p, x->b, s->b, s->b_stride, first, s->samples, s->single);
    read_rows(p, x->multipliers, s->multipliers, p->constraints, first, s->samples, s->single);
    for (int64_t k = 0; k < p->given; k++) {
        const Kind kind = p->kind[k];
        lanes y = x->z[k], u = x->u[k], psi, phi;
        if (p->plain[k]) {
            psi = negative_entropy(kind, y);
            phi = integral(kind, u);
        } else {
            double size = p->scale[k] * p->temperature[k];
            lanes z = (y - p->shift[k]) / p->scale[k];
            if (p->upper[k] < INFINITY) { /* the ends, as y has them, go to the ends exactly */
                double lower = s->single ? (float)p->lower[k] : p->lower[k];
                double upper = s->single ? (float)p->upper[k] : p->upper[k];
                z = choose(y == lower, all(kind == TANH ? -1.0 : 0.0), z);
                z = choose(y == upper, all(1.0), z);
            }
            psi = size * negative_entropy(kind, z);
            phi = p->shift[k] * u + size * integral(kind, u / p->temperature[k]);
        }
        loss += psi - y * x->v[k] + phi;
    }
    for (int64_t i = 0; i < p->rows; i++) loss -= x->b[i] * x->multipliers[i];
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        put(s->loss, first + l, s->single, loss[l]);
    __atomic_fetch_sub(&s->unsolved, LANES, __ATOMIC_RELAXED);
}

#endif
