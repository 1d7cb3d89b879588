/* The derivatives of inequalities and bounds: those of the equations that are active. */
#ifndef TAUT_PULLBACK_H
#define TAUT_PULLBACK_H

#include "within.h"

typedef struct {
    Sides sides;
    lanes *g, *g_z, *dv, *t; /* outputs; rooms of `sides` that nobody needs here */
    lanes *g_nu, *rhs;       /* rows, likewise */
    Sample sample;           /* one at a time; room for it is made when it is needed */
    void *memory, *sample_memory;
} Pulling;

static void *make_pulling(const Plan *p, Pulling *x) {
    x->sample_memory = NULL;
    x->memory = make_sides(p, &x->sides);
    x->g = x->sides.answer_u;
    x->g_z = x->sides.answer_z;
    x->dv = x->sides.old_z;
    x->t = x->sides.old_u;
    x->g_nu = x->sides.noise;
    x->rhs = x->sides.s;
    return x->memory;
}

/* w, 0 where z is clipped. `floor` and `ceiling` then tell which outputs are, by 1: not those held at an
 * end of the range, whose w is 0 too. */
PART void find_slopes(const Plan *p, const Pull *s, Sides *x, mask live, int64_t first) {
    x->held = live & ~live;
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    if (s->floor) {
        read_bound(p, x->floor, s->floor, first, s->samples, s->single, -INFINITY);
        read_bound(p, x->ceiling, s->ceiling, first, s->samples, s->single, INFINITY);
    }
    for (int64_t k = 0; k < p->outputs; k++) {
        const mask held = live & is_infinite(x->u[k]);
        x->held |= held;
        Output out = activate_output(p, k, choose(live, x->u[k], all(0.0)));
        out.slope = choose(held, all(0.0), out.slope);
        if (s->floor) {
            mask fixed = (x->floor[k] == x->ceiling[k]) & ~held;
            mask low = (out.z < x->floor[k]) | fixed, high = (out.z > x->ceiling[k]) & ~fixed;
            out.slope = choose(low | high, all(0.0), out.slope);
            x->floor[k] = choose(live & low, all(1.0), all(0.0));
            x->ceiling[k] = choose(live & high, all(1.0), all(0.0));
        }
        x->w[k] = k < p->given ? out.slope : all(0.0);
    }
}

/* The active rows, in `orthant`; gradients, 0 in samples that failed; g = g_u + w∘g_z and C g + g_ν */
PART void read_gradients(const Plan *p, const Pull *s, Pulling *y, mask live, int64_t first) {
    Sides *x = &y->sides;
    read_side(p, x->lower, s->lower, first, s->samples, s->single, -INFINITY);
    read_side(p, x->upper, s->upper, first, s->samples, s->single, INFINITY);
    read_rows(p, x->nu, s->multipliers, p->constraints, first, s->samples, s->single);
    memset(y->g_nu, 0, p->rows * sizeof *y->g_nu);
    memset(y->g_z, 0, p->outputs * sizeof *y->g_z);
    memset(y->g, 0, p->outputs * sizeof *y->g);
    if (s->g_multipliers)
        read_rows(p, y->g_nu, s->g_multipliers, p->constraints, first, s->samples, s->single);
    if (s->g_u) read_outputs(p, y->g, s->g_u, first, s->samples, s->single);
    if (s->g_z) read_outputs(p, y->g_z, s->g_z, first, s->samples, s->single);
    for (int64_t k = 0; k < p->outputs; k++) {
        mask taken = live;
        if (any(x->held)) { /* an end has no gradient; a bound has that of z */
            mask held = is_infinite(x->u[k]);
            y->g[k] = choose(held, all(0.0), y->g[k]);
            if (s->floor) held &= (x->floor[k] == 0.0) & (x->ceiling[k] == 0.0);
            taken &= ~held;
        }
        y->g_z[k] = choose(taken, y->g_z[k], all(0.0));
        y->g[k] = choose(live, y->g[k], all(0.0)) + x->w[k] * y->g_z[k];
    }
    apply_all(p, y->g, 1, y->rhs);
    for (int64_t i = 0; i < p->rows; i++) {
        mask active = live & is_active(x, i);
        x->orthant[i] = choose(active, all(1.0), all(0.0));
        y->g_nu[i] = choose(active, y->g_nu[i], all(0.0));
        y->rhs[i] = choose(active, y->rhs[i] + y->g_nu[i], all(0.0));
    }
}

/* ∂v = g − w∘Cᵀs, and t = g_z − Cᵀs; returns the largest |∂v| */
PART lanes complete(const Plan *p, Pulling *y) {
    Sides *x = &y->sides;
    const int64_t count = list_pairs(p, x->step, x->pairs);
    lanes largest = all(0.0), sum[TILE];
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        adjoint_of(p, x->step, x->pairs, count, k, sum);
        for (int t = 0; t < TILE; t++) {
            y->dv[k + t] = y->g[k + t] - x->w[k + t] * sum[t];
            y->t[k + t] = y->g_z[k + t] - sum[t];
            largest = larger(largest, absolute(y->dv[k + t]));
        }
    }
    return largest;
}

/* s with the digits that g_z − Cᵀs needs where rows pin an output: `_refined` of systems/pull.py */
PART void refine_pull(const Plan *p, Pulling *y, int64_t n) {
    Sides *x = &y->sides;
    apply_all(p, y->dv, 1, x->trial);
    for (int64_t i = 0; i < p->rows; i++)
        x->trial[i] = choose(x->orthant[i] != 0.0, x->trial[i] + y->g_nu[i], all(0.0));
    gather_rows(x->index, n, x->trial, x->x);
    solve_own(n, x->own, x->diagonal, x->x);
    scatter_rows(x->index, n, x->x, x->change, p->rows);
    for (int64_t i = 0; i < p->rows; i++) x->step[i] += x->change[i];
}

/* The largest running error of the pivots, and |g| + w∘|C|ᵀ|s|: see `running_error` of gradient.h */
PART void error_of_pull(const Plan *p, const Line *line, Pulling *y, int64_t n, lanes *error,
                        lanes *summed) {
    Sides *x = &y->sides;
    *error = all(line ? line->error : 0.0);
    for (int64_t i = 0; i < n; i++) {
        const lanes *row = x->own + triangle(i);
        lanes sum = row[i];
        for (int l = 0; line && l < LANES; l++)
            if (x->index[i * LANES + l] >= 0) sum[l] = line->made_of[x->index[i * LANES + l]];
        for (int64_t j = 0; j < i; j++) sum += row[j] * row[j] * x->y[j];
        x->y[i] = sum * x->diagonal[i] * x->diagonal[i];
        *error = larger(*error, x->y[i]);
    }
    *summed = largest_sum(p, y->g, x->w, x->step);
}

/* Lane l by Gauss–Jordan; false where there is no memory for it */
PART int route_pull(const Plan *p, const Pull *s, Pulling *y, int64_t first, int l) {
    if (!y->sample_memory) y->sample_memory = make_sample(&y->sample, p->kept, p->given);
    if (!y->sample_memory) return 0;
    Sides *x = &y->sides;
    Sample *one = &y->sample;
    const int64_t n = sample(first, l, s->samples);
    for (int64_t k = 0; k < p->given; k++) {
        one->w[k] = x->w[k][l];
        one->g_z[k] = y->g_z[k][l];
        one->g_u[k] = s->g_u && !isinf(x->u[k][l]) ? number(s->g_u, n * p->given + k, s->single) : 0.0;
    }
    for (int64_t i = 0; i < p->kept; i++) {
        load_row(one, i, x->orthant[i][l] == 0.0 ? NULL : p->a + i * p->outputs, p->given);
        one->g_v[i] = y->g_nu[i][l];
    }
    if (!solve_stably(one, NULL)) return 0;
    for (int64_t k = 0; k < p->given; k++) {
        y->dv[k][l] = one->x[k];
        y->t[k][l] = one->t[k];
    }
    for (int64_t i = 0; i < p->kept; i++) x->step[i][l] = one->s[i];
    return 1;
}

/* Some entries of ∂lower or ∂upper, where there is room for them */
INLINE void write_side(const Plan *p, const Pull *s, Sides *x, void *to, int lower, int64_t first) {
    if (!to) return;
    for (int64_t i = 0; i < p->rows; i++) {
        mask low = (x->nu[i] > 0.0) | (x->lower[i] == x->upper[i]);
        x->trial[i] = choose(lower ? low : ~low, x->step[i], all(0.0));
    }
    write_rows(p, x->trial, to, first, s->samples, s->single);
}

INLINE void write_bound(const Plan *p, const Pull *s, Pulling *y, const lanes *which, void *to,
                        int64_t first) {
    if (!to) return;
    for (int64_t k = 0; k < p->outputs; k++)
        y->sides.y[k] = choose(which[k] != 0.0, y->t[k], all(0.0));
    write_outputs(p, y->sides.y, to, first, s->samples, s->single);
}

/* s_F = H⁻¹(C_F g + g_ν), ∂v = g − w∘C_Fᵀs: see problems/inequalities.py */
PART void pull_block(const Plan *p, Pull *s, Pulling *y, int64_t first) {
    Sides *x = &y->sides;
    mask live = all(0.0) == all(0.0), dependent;
    for (int l = 0; l < LANES; l++) live[l] = -(s->status[sample(first, l, s->samples)] == 0);
    mask fine = live | ~live;
    find_slopes(p, s, x, live, first);
    read_gradients(p, s, y, live, first);
    const Line *line = s->floor ? NULL : s->line;
    const int64_t n = solve_active(p, line, x, s->rules, y->rhs, &dependent);
    lanes largest = complete(p, y), least = all(INFINITY), most = all(0.0), taken = all(0.0);
    if (s->floor) {
        refine_pull(p, y, n);
        largest = complete(p, y);
    }
    for (int64_t k = 0; k < p->given; k++) {
        least = at_most(x->w[k], least);
        most = at_least(x->w[k], most);
    }
    for (int64_t i = 0; i < p->rows; i++) taken += p->largest[i] * absolute(x->step[i]);
    mask even = (least >= p->even * most) & (largest >= p->faint * most * taken);
    mask doubt = live & ~(~dependent & even);
    if (any(doubt)) {
        lanes error, summed;
        error_of_pull(p, line, y, n, &error, &summed);
        doubt &= ~(~dependent & (largest >= p->safe * error * summed));
        for (int l = 0; l < LANES && first + l < s->samples; l++)
            if (doubt[l]) fine[l] &= -route_pull(p, s, y, first, l);
    }
    for (int64_t i = 0; i < p->rows; i++) {
        x->step[i] = choose(x->orthant[i] != 0.0, x->step[i], all(0.0));
        fine &= absolute(x->step[i]) < INFINITY;
    }
    for (int64_t k = 0; k < p->outputs; k++) y->dv[k] = choose(live, y->dv[k], all(0.0));
    write_outputs(p, y->dv, s->dv, first, s->samples, s->single);
    write_side(p, s, x, s->dlower, 1, first);
    write_side(p, s, x, s->dupper, 0, first);
    write_bound(p, s, y, x->floor, s->dfloor, first);
    write_bound(p, s, y, x->ceiling, s->dceiling, first);
    for (int l = 0; l < LANES && first + l < s->samples; l++) {
        s->left[first + l] = !fine[l];
        if (fine[l]) __atomic_fetch_sub(&s->unsolved, 1, __ATOMIC_RELAXED);
    }
}

#endif
