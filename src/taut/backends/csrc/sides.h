/* lower ≤ C z ≤ upper and bounds on z, LANES samples at a time: what solvers/sides.py is in torch.
 * ν carries its sign: > 0 holds a row at its lower side, < 0 at its upper one, 0 is inactive. */
#ifndef TAUT_SIDES_H
#define TAUT_SIDES_H

#include <stdlib.h>

#include "subset.h"
#include "stable.h"

#define EPS 0x1p-52
#define TINY 1e-290

typedef struct {
    lanes *v, *u, *z, *w, *floor, *ceiling; /* outputs */
    lanes *old_u, *old_z, *answer_u, *answer_z, *more;      /* outputs */
    lanes *lower, *upper, *nu, *r, *s, *size, *noise;       /* rows; r = C z */
    lanes *orthant, *step, *old_nu, *change, *trial;        /* rows */
    lanes *start, *answer;                                  /* multipliers */
    lanes *y;                                               /* the longer of the two */
    lanes *gram, *own, *diagonal, *x;                       /* the system of the active rows */
    int64_t *index, *pairs, *place, *some;
    int boxed; /* has z bounds? */
    mask held; /* has v an infinite entry? Its output is held at an end of the range, or a bound. */
} Sides;

static void *make_sides(const Plan *p, Sides *x) {
    const int64_t K = p->outputs, rows = p->rows, longest = K > rows ? K : rows;
    lanes *index, *pairs, *place, *some;
    lanes **parts[] = {&x->v,     &x->u,     &x->z,       &x->w,    &x->floor,  &x->ceiling,
                       &x->old_u, &x->old_z, &x->answer_u, &x->answer_z, &x->more, &x->lower,   &x->upper, &x->nu,    &x->r,
                       &x->s,     &x->size,  &x->noise,   &x->orthant, &x->step, &x->old_nu,
                       &x->change, &x->trial, &x->start, &x->answer, &x->y,      &x->gram,  &x->own,  &x->diagonal,
                       &x->x,     &index,    &pairs,      &place,   &some};
    int64_t sizes[] = {K,    K,    K,    K,    K,    K,    K,    K,    K,    K,    K,       rows, rows, rows, rows, rows,
                       rows, rows, rows, rows, rows, rows, rows, rows, rows, longest, triangle(rows), triangle(rows), rows,
                       rows, rows, rows, rows, rows};
    const int count = sizeof sizes / sizeof *sizes;
    int64_t total = 0;
    for (int i = 0; i < count; i++) total += sizes[i] + GAP;
    char *memory = malloc((total + 1) * sizeof(lanes));
    if (!memory) return NULL;
    lanes *at = (lanes *)(((uintptr_t)memory + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes));
    for (int i = 0; i < count; i++, at += GAP) {
        *parts[i] = at;
        at += sizes[i];
        GUARD(at);
    }
    x->index = (int64_t *)index;
    x->pairs = (int64_t *)pairs;
    x->place = (int64_t *)place;
    x->some = (int64_t *)some;
    return memory;
}

/* The smallest subgradient of D: 0 where ν is optimal */
INLINE lanes subgradient(lanes nu, lanes r, lanes lower, lanes upper) {
    lanes near = r - at_most(at_least(r, lower), upper);
    lanes s = choose(nu < 0.0, r - upper, near);
    return choose((nu > 0.0) | (lower == upper), r - lower, s);
}

/* The side at which ν holds a row; 0 where it is inactive */
INLINE lanes held_side(lanes nu, lanes lower, lanes upper) {
    lanes side = choose(nu < 0.0, upper, all(0.0));
    return choose((nu > 0.0) | (lower == upper), lower, side);
}

INLINE mask is_active(const Sides *x, int64_t i) {
    return (x->nu[i] != 0.0) | (x->lower[i] == x->upper[i]);
}

/* Cᵀx for TILE outputs, as `adjoint`, from pairs of rows of which one is not 0: others add 0 */
INLINE void adjoint_of(const Plan *p, const lanes *x, const int64_t *pairs, int64_t count, int64_t k,
                       lanes *out) {
    if (p->row_start) {
        adjoint(p, x, k, out);
        return;
    }
    lanes even[TILE], odd[TILE];
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) even[t] = odd[t] = all(0.0);
    for (int64_t q = 0; q < count; q++) {
        const double *a = p->a + pairs[q] * p->outputs + k;
        const lanes one = x[pairs[q]], two = x[pairs[q] + 1];
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) {
            even[t] += a[t] * one;
            odd[t] += a[p->outputs + t] * two;
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) out[t] = even[t] + odd[t];
}

INLINE int64_t list_pairs(const Plan *p, const lanes *x, int64_t *pairs) {
    int64_t count = 0;
    for (int64_t i = 0; i < p->kept; i += 2)
        if (any((x[i] != 0.0) | (x[i + 1] != 0.0))) pairs[count++] = i;
    return count;
}

INLINE void apply_all(const Plan *p, const lanes *x, int sign, lanes *out) {
    for (int64_t i = 0; i < p->rows; i += TILE) apply(p, x, i, sign, out + i);
}

/* z within its bounds; the slope is 0 where it is not */
INLINE lanes clipped(const Sides *x, int64_t k, lanes z, lanes *slope) {
    *slope = choose((z > x->floor[k]) & (z < x->ceiling[k]), *slope, all(0.0));
    return at_most(at_least(z, x->floor[k]), x->ceiling[k]);
}

/* z of held outputs: the end exactly, or the bound */
PART void hold_outputs(const Plan *p, Sides *x) {
    set_ends(p, x->u, x->z);
    for (int64_t k = 0; x->boxed && k < p->given; k++)
        x->z[k] = at_most(at_least(x->z[k], x->floor[k]), x->ceiling[k]);
}

/* w|v|, of which held outputs have none: 0·∞ is NaN */
INLINE lanes rounded_from(const Sides *x, int64_t k, lanes v) {
    return choose(x->held & is_infinite(x->v[k]), all(0.0), x->w[k] * v);
}

/* u, z, w and C z at ν; returns how far u has moved */
PART lanes evaluate_sides(const Plan *p, Sides *x) {
    const int64_t count = list_pairs(p, x->nu, x->pairs);
    lanes reach = all(0.0), sum[TILE];
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        adjoint_of(p, x->nu, x->pairs, count, k, sum);
        for (int t = 0; t < TILE; t++) {
            lanes u = x->v[k + t] + sum[t];
            reach = farther(reach, absolute(u - x->u[k + t])); /* ∞ − ∞ where held */
            x->u[k + t] = u;
            Output out = activate_output(p, k + t, u);
            if (x->boxed) out.z = clipped(x, k + t, out.z, &out.slope);
            x->z[k + t] = out.z;
            x->w[k + t] = out.slope;
        }
    }
    if (any(x->held)) hold_outputs(p, x);
    apply_all(p, x->z, 1, x->r);
    return reach;
}

/* s, and |side| + |C||z|, which is its size; returns the worst of their ratios */
PART lanes plain_level(const Plan *p, Sides *x) {
    lanes worst = all(0.0), terms[TILE];
    for (int64_t k = 0; k < p->outputs; k++) x->y[k] = absolute(x->z[k]);
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            const int64_t j = i + t;
            x->s[j] = subgradient(x->nu[j], x->r[j], x->lower[j], x->upper[j]);
            lanes side = absolute(held_side(x->nu[j], x->lower[j], x->upper[j]));
            x->size[j] = at_least(side + terms[t], all(TINY));
            worst = larger(worst, absolute(x->s[j]) / x->size[j]);
        }
    }
    return worst;
}

/* The same over what is rounded in it: with w|v|, and with w|C|ᵀ|ν| too. See Levels of sides.py. */
PART void rounding_levels(const Plan *p, Sides *x, lanes *fair, lanes *rough) {
    lanes one[TILE], two[TILE];
    for (int64_t k = 0; k < p->outputs; k++) {
        lanes sum = all(0.0);
        for (int64_t i = 0; i < p->kept; i++)
            sum += p->absolute[i * p->outputs + k] * absolute(x->nu[i]);
        x->y[k] = rounded_from(x, k, absolute(x->v[k]));
        x->more[k] = x->y[k] + x->w[k] * sum;
    }
    *fair = *rough = all(0.0);
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, one);
        apply(p, x->more, i, 0, two);
        for (int t = 0; t < TILE; t++) {
            lanes s = absolute(x->s[i + t]);
            *fair = larger(*fair, s / (x->size[i + t] + one[t]));
            *rough = larger(*rough, s / (x->size[i + t] + two[t]));
        }
    }
}

/* What a row at its side may be off by rounding: it must not become active for 1e-17. */
PART void find_noise(const Plan *p, Sides *x) {
    for (int64_t k = 0; k < p->outputs; k++)
        x->y[k] = absolute(x->z[k]) + rounded_from(x, k, absolute(x->u[k]) + absolute(x->v[k]));
    apply_all(p, x->y, 0, x->noise);
    for (int64_t i = 0; i < p->rows; i++) x->noise[i] *= 2.0 * EPS;
}

/* Is every row within `most` of |side| + |C||z|? One whose multiplier is not 0, of its side. */
PART mask keeps(const Plan *p, Sides *x, double most, int64_t first) {
    mask fine = all(0.0) == all(0.0);
    lanes terms[TILE];
    for (int64_t k = 0; k < p->outputs; k++) x->y[k] = absolute(x->z[k]);
    for (int64_t i = first; i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            const lanes nu = x->nu[i + t], low = x->lower[i + t], high = x->upper[i + t];
            lanes off = absolute(subgradient(nu, x->r[i + t], low, high));
            mask lower = (nu > 0.0) | ((nu == 0.0) & (x->r[i + t] < low));
            lanes side = absolute(choose(lower, low, high));
            mask good = off <= most * at_least(side + terms[t], all(0x1p-1022));
            fine &= (off <= 0.0) | good;
        }
    }
    return fine;
}

/* How far z is beyond what is asked of it, at most */
INLINE lanes violation(const Plan *p, const Sides *x) {
    lanes worst = all(0.0);
    for (int64_t i = 0; i < p->rows; i++) {
        worst = larger(worst, x->lower[i] - x->r[i]);
        worst = larger(worst, x->r[i] - x->upper[i]);
    }
    for (int64_t k = 0; x->boxed && k < p->outputs; k++) {
        worst = larger(worst, x->floor[k] - x->z[k]);
        worst = larger(worst, x->z[k] - x->ceiling[k]);
    }
    return worst;
}

#endif
