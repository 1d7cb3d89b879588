/* Rows of G with one entry bound one output: z is clipped there, and the multiplier is known after.
 * See solvers/split.py. */
#ifndef TAUT_BOX_H
#define TAUT_BOX_H

#include "sides.h"

/* u with σ(u) = z */
INLINE lanes inverse_output(const Plan *p, int64_t k, lanes z) {
    lanes y = p->plain[k] ? z : (z - p->shift[k]) / p->scale[k], found = y;
    if (p->kind[k] == EXP) found = logarithm(y);
    if (p->kind[k] == SIGMOID) found = logarithm(y) - logarithm_of_one_plus(-y);
    if (p->kind[k] == TANH) found = 0.5 * (logarithm_of_one_plus(y) - logarithm_of_one_plus(-y));
    return p->plain[k] ? found : p->temperature[k] * found;
}

/* What row i asks of its output. A bound at an end of the range or beyond, where z is not, is none. */
INLINE void own_bounds(const Plan *p, const Within *s, const Sides *x, int64_t i, lanes *floor,
                       lanes *ceiling) {
    const int64_t k = s->only[i];
    const double entry = p->a[i * p->outputs + k];
    lanes low = x->lower[i] / entry, high = x->upper[i] / entry;
    *floor = entry > 0 ? low : high;
    *ceiling = entry > 0 ? high : low;
    *floor = choose(*floor <= s->lowest[k], all(-INFINITY), *floor);
    *ceiling = choose(*ceiling >= s->highest[k], all(INFINITY), *ceiling);
}

/* Such rows become bounds where `which`; returns where no two of them exclude each other. */
PART mask make_box(const Plan *p, const Within *s, Sides *x, mask which) {
    lanes floor, ceiling;
    mask fine = which;
    for (int64_t k = 0; k < p->outputs; k++) {
        x->floor[k] = all(-INFINITY);
        x->ceiling[k] = all(INFINITY);
    }
    for (int64_t i = 0; i < p->rows; i++) {
        const int64_t k = s->only[i];
        if (k < 0) continue;
        own_bounds(p, s, x, i, &floor, &ceiling);
        x->floor[k] = choose(which, at_least(x->floor[k], floor), x->floor[k]);
        x->ceiling[k] = choose(which, at_most(x->ceiling[k], ceiling), x->ceiling[k]);
        x->lower[i] = choose(which, all(-INFINITY), x->lower[i]);
        x->upper[i] = choose(which, all(INFINITY), x->upper[i]);
        x->nu[i] = choose(which, all(0.0), x->nu[i]);
    }
    for (int64_t k = 0; k < p->given; k++) {
        fine &= x->floor[k] <= x->ceiling[k];
        fine &= (x->floor[k] < s->highest[k]) & (x->ceiling[k] > s->lowest[k]);
    }
    return fine;
}

/* Their multipliers, which are part of u: z = σ(u). The sides are those that were given, again. */
PART void leave_box(const Plan *p, const Within *s, Sides *x, mask which) {
    lanes floor, ceiling;
    for (int64_t k = 0; k < p->outputs; k++) {
        lanes z = x->z[k], free = activate_output(p, k, x->u[k]).z;
        mask low = which & (z > free) & (z == x->floor[k]);
        mask high = which & (z < free) & (z == x->ceiling[k]);
        x->y[k] = all(0.0);
        if (any(low | high)) {
            lanes pull = inverse_output(p, k, z) - x->u[k];
            x->y[k] = choose(low, at_least(pull, all(0.0)), x->y[k]);
            x->y[k] = choose(high, at_most(pull, all(0.0)), x->y[k]);
        }
        x->more[k] = x->y[k];
    }
    for (int64_t i = 0; i < p->rows; i++) { /* the first row that asks for a bound has it all */
        const int64_t k = s->only[i];
        if (k < 0) continue;
        own_bounds(p, s, x, i, &floor, &ceiling);
        mask asks = which & (((x->y[k] > 0.0) & (floor == x->floor[k])) |
                             ((x->y[k] < 0.0) & (ceiling == x->ceiling[k])));
        x->nu[i] = choose(asks, x->y[k] / p->a[i * p->outputs + k], x->nu[i]);
        x->y[k] = choose(asks, all(0.0), x->y[k]);
    }
    for (int64_t k = 0; k < p->outputs; k++) x->u[k] += choose(which, x->more[k], all(0.0));
}

#endif
