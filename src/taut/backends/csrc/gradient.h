/* The derivatives of the solve, and the matched loss. */
#ifndef TAUT_GRADIENT_H
#define TAUT_GRADIENT_H

#include "factor.h"
#include "state.h"

/* The largest running error of the pivots, and |g| + w∘|A|ᵀ|s|: Running and _is_safe of systems/pull.py */
PART void running_error(const Plan *p, Work *x, lanes *error, lanes *summed) {
    *error = all(0.0);
    for (int64_t i = 0; i < p->kept; i++) {
        const lanes *row = x->gram + triangle(i);
        lanes sum = row[i];
        for (int64_t j = 0; j < i; j++) sum += row[j] * row[j] * x->y[j];
        x->y[i] = sum * x->diagonal[i] * x->diagonal[i];
        *error = larger(*error, x->y[i]);
    }
    *summed = largest_sum(p, x->v, x->w, x->step);
}

/* Lane l by Gauss–Jordan; false: left to the caller */
PART int route(const Plan *p, const Backward *s, Work *x, int64_t first, int l) {
    if (!x->sample_memory) x->sample_memory = make_sample(&x->sample, p->kept, p->given);
    if (!x->sample_memory) return 0;
    Sample *one = &x->sample;
    const int64_t n = sample(first, l, s->samples);
    int64_t rows = 0;
    for (int64_t k = 0; k < p->given; k++) {
        const int64_t at = n * p->given + k, held = isinf(number(s->u, at, s->single));
        one->w[k] = x->w[k][l];
        one->g_z[k] = s->g_z && !held ? number(s->g_z, at, s->single) : 0.0;
        one->g_u[k] = s->g_u && !held ? number(s->g_u, at, s->single) : 0.0;
    }
    for (int64_t i = 0; i < p->kept; i++) {
        const int64_t row = p->order[i];
        rows += row >= 0;
        load_row(one, i, row < 0 ? NULL : p->a + i * p->outputs, p->given);
        one->g_v[i] = row < 0 || !s->g_multipliers
                          ? 0.0
                          : number(s->g_multipliers, n * p->constraints + row, s->single);
    }
    if (!solve_stably(one, NULL)) return 0;
    for (int64_t k = 0; k < p->given; k++) x->u[k][l] = one->x[k];
    for (int64_t i = 0; i < p->kept; i++) x->step[i][l] = one->s[i];
    /* The least s, of lost rows beside those that the plan has left out, is the caller's. */
    return !one->lost || rows == p->constraints;
}

/* Lanes in doubt keep what Cholesky found where it is safe, see systems/pull.py, or are routed.
 * Returns where that was possible. */
PART mask route_doubtful(const Plan *p, const Backward *s, Work *x, int64_t first, mask doubt,
                         mask fine, lanes found) {
    lanes error, summed;
    /* Without the held outputs equations may depend on each other: left to the caller. */
    const mask left = doubt & x->held & ~fine;
    doubt &= ~left;
    if (!p->inverse) {
        running_error(p, x, &error, &summed);
        doubt &= ~(fine & (found >= p->safe * error * summed));
    }
    fine = doubt | ~doubt;
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        if (doubt[l]) fine[l] = -route(p, s, x, first, l);
    return fine & ~left;
}

/* s = (A diag(w) Aᵀ)⁻¹(A g + g_λ), ∂v = g − w∘Aᵀs, with g = g_u + w∘g_z: see problems/linear.py */
PART void backward_block(const Plan *p, Backward *s, Work *x, int64_t first) {
    mask live = all(0.0) == all(0.0);
    lanes least = all(INFINITY), most = all(0.0), found = all(0.0);
    for (int l = 0; l < LANES; l++) live[l] = -(s->status[sample(first, l, s->samples)] == 0);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    x->held = live & ~live;
    for (int64_t k = 0; k < p->given; k++) {
        x->held |= live & is_infinite(x->u[k]);
        lanes w = activate_output(p, k, choose(live, x->u[k], all(0.0))).slope;
        least = at_most(w, least);
        most = at_least(w, most);
        x->w[k] = w;
    }
    for (int64_t k = p->given; k < p->outputs; k++) x->w[k] = all(0.0);
    if (s->g_u) read_outputs(p, x->v, s->g_u, first, s->samples, s->single);
    if (s->g_z) read_outputs(p, x->z, s->g_z, first, s->samples, s->single);
    for (int64_t k = 0; k < p->outputs; k++) {
        lanes g = s->g_u ? x->v[k] : all(0.0);
        if (s->g_z) g += x->w[k] * x->z[k];
        if (any(x->held)) g = choose(is_infinite(x->u[k]), all(0.0), g);
        x->v[k] = choose(live, g, all(0.0));
    }
    for (int64_t i = 0; i < p->rows; i += TILE) apply(p, x->v, i, 1, x->step + i);
    if (s->g_multipliers) {
        read_rows(p, x->residual, s->g_multipliers, p->constraints, first, s->samples, s->single);
        for (int64_t i = 0; i < p->rows; i++)
            x->step[i] += choose(live, x->residual[i], all(0.0));
    }
    mask fine = live | ~live, factorised = fine;
    if (!p->inverse) {
        form_gram(p, x->w, x->gram);
        factorise(p, x->gram, x->diagonal, s->rules->pivot, &factorised);
    }
    solve_gram(p, x->gram, x->diagonal, x->step, x->y);
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        lanes sum[TILE];
        adjoint(p, x->step, k, sum);
        for (int t = 0; t < TILE; t++) {
            x->u[k + t] = x->v[k + t] - x->w[k + t] * sum[t];
            sum[t] = absolute(x->u[k + t]);
        }
        found = at_least(at_least(sum[0], sum[1]), at_least(at_least(sum[2], sum[3]), found));
    }
    /* w∘Aᵀs is at most this: where ∂v is no faint part of it, it has not cancelled with g. */
    lanes taken = all(0.0);
    for (int64_t i = 0; i < p->kept; i++) taken += p->largest[i] * absolute(x->step[i]);
    mask doubt = live & ~(factorised & (least >= p->even * most) & (found >= p->faint * most * taken));
    /* Outputs held at an end have the slope 0, and put a sample in doubt. */
    if (any(doubt)) fine = route_doubtful(p, s, x, first, doubt, factorised, found);
    for (int64_t i = 0; i < p->kept; i++) {
        fine &= absolute(x->step[i]) < INFINITY;
        x->step[i] = choose(live, x->step[i], all(0.0));
    }
    fine |= ~live;
    for (int64_t k = 0; k < p->outputs; k++) x->u[k] = choose(live, x->u[k], all(0.0));
    for (int64_t i = 0; i < p->kept; i++) x->step[i] = choose(fine, x->step[i], all(NAN));
    write_outputs(p, x->u, s->dv, first, s->samples, s->single);
    write_rows(p, x->step, s->db, first, s->samples, s->single);
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        if (fine[l]) __atomic_fetch_sub(&s->unsolved, 1, __ATOMIC_RELAXED);
}

/* Samples each with its A, all by Gauss–Jordan: solve_stably of systems/stable.py. False where there
 * is no memory for one. */
PART int stable_block(Stable *s, Sample *x, int64_t n) {
    const int64_t I = s->equations, K = s->outputs;
    memcpy(x->w, s->w + n * K, K * sizeof(double));
    memcpy(x->g_z, s->g_z + n * K, K * sizeof(double));
    memcpy(x->g_u, s->g_u + n * K, K * sizeof(double));
    memcpy(x->g_v, s->g_v + n * I, I * sizeof(double));
    for (int64_t i = 0; i < I; i++)
        load_row(x, i, s->left_out && s->left_out[n * I + i] ? NULL : s->a + n * s->stride + i * K, K);
    if (!solve_stably(x, s->metric ? s->metric + n * s->metric_stride : NULL)) return 0;
    memcpy(s->x + n * K, x->x, K * sizeof(double));
    memcpy(s->s + n * I, x->s, I * sizeof(double));
    memcpy(s->t + n * K, x->t, K * sizeof(double));
    __atomic_fetch_sub(&s->unsolved, 1, __ATOMIC_RELAXED);
    return 1;
}

/* What a held output takes of b: z·(Aᵀλ) */
INLINE lanes taken_by(const Plan *p, const Work *x, int64_t k) {
    lanes sum = all(0.0);
    for (int64_t i = 0; i < p->rows; i++) sum += p->a[i * p->outputs + k] * x->multipliers[i];
    return choose(x->u[k] > 0.0, all(highest_end(p, k)), all(lowest_end(p, k))) * sum;
}

/* Is y a number within the closed range of output k? */
INLINE mask is_target(const Plan *p, int64_t k, lanes y) {
    return (y >= lowest_end(p, k)) & (y <= highest_end(p, k)) & (absolute(y) < INFINITY);
}

/* Σψ(y) − yᵀv − bᵀλ + Σφ(u): see losses.py. Held outputs are left out, and b is less what they take. */
INLINE lanes matched_loss(const Plan *p, const Work *x, const lanes *target, int64_t single) {
    lanes loss = all(0.0);
    for (int64_t k = 0; k < p->given; k++) {
        const Kind kind = p->kind[k];
        lanes y = target[k], u = x->u[k], psi, phi;
        if (p->plain[k]) {
            psi = negative_entropy(kind, y);
            phi = integral(kind, u);
        } else {
            double size = p->scale[k] * p->temperature[k];
            lanes z = (y - p->shift[k]) / p->scale[k];
            /* The ends, as y has them, go to the ends exactly. */
            if (kind == EXP) {
                double end = single ? (float)p->shift[k] : p->shift[k];
                z = choose(y == end, all(0.0), z);
            } else if (p->upper[k] < INFINITY) {
                double lower = single ? (float)p->lower[k] : p->lower[k];
                double upper = single ? (float)p->upper[k] : p->upper[k];
                /* Rounding puts what is next to an end beyond it; what is beyond has no loss. */
                double low = kind == TANH ? -1.0 : 0.0;
                z = choose((y == lower) | ((y > lower) & (z < low)), all(low), z);
                z = choose((y == upper) | ((y < upper) & (z > 1.0)), all(1.0), z);
            }
            psi = size * negative_entropy(kind, z);
            phi = p->shift[k] * u + size * integral(kind, u / p->temperature[k]);
        }
        lanes part = psi - y * x->v[k] + phi;
        const mask held = x->held & is_infinite(u);
        if (any(held)) part = choose(held, choose(is_target(p, k, y), taken_by(p, x, k), all(NAN)), part);
        loss += part;
    }
    for (int64_t i = 0; i < p->rows; i++) loss -= x->b[i] * x->multipliers[i];
    return loss;
}

PART void loss_block(const Plan *p, Loss *s, Work *x, int64_t first) {
    read_outputs(p, x->v, s->v, first, s->samples, s->single);
    read_outputs(p, x->z, s->y, first, s->samples, s->single);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    x->held = all(0.0) == all(0.0);
    read_rows(p, x->b, s->b, s->b_stride, first, s->samples, s->single);
    read_rows(p, x->multipliers, s->multipliers, p->constraints, first, s->samples, s->single);
    lanes loss = matched_loss(p, x, x->z, s->single);
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        put(s->loss, first + l, s->single, loss[l]);
    __atomic_fetch_sub(&s->unsolved, LANES, __ATOMIC_RELAXED);
}

#endif
