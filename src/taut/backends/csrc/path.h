/* The path of the interior point method: samples at t and ν, with slacks and multipliers beside them,
 * and how far they are from the conditions of optimality. Rows have length 1; where σ is a line, they
 * are what is left of G when the equations are eliminated. */
#ifndef TAUT_PATH_H
#define TAUT_PATH_H

#include "active.h"

#define FIRST_LOGIT 2.0 /* the largest that the path begins with */
#define LEAST 1e-3      /* of the largest row: no row is measured by less */
#define NONE 1e-140     /* a distance that is none: its square is no number */

typedef struct {
    const Plan *p;
    const Line *line;
    Sides *x;
    int64_t rows, all;    /* of the system; with bounds on z, which are eliminated from it */
    const double *norm;
    lanes *lower, *upper, *below, *above, *up, *down, *nu, *r; /* all; where the samples are */
    lanes *theta, *goal_low, *goal_high, *size, *moved;
    lanes *d, *dr, *d_below, *d_above, *d_up, *d_down;
    lanes t, dt, unit_z, unit_u;
    void *memory;
} Path;

static int make_path(const Plan *p, Path *y) {
    lanes **parts[] = {&y->lower, &y->upper,    &y->below,     &y->above, &y->up,    &y->down, &y->nu,
                       &y->r,     &y->theta,    &y->goal_low,  &y->goal_high, &y->size, &y->moved,
                       &y->d,     &y->dr,       &y->d_below,   &y->d_above,   &y->d_up, &y->d_down};
    const int64_t each = p->rows + p->outputs, count = sizeof parts / sizeof *parts;
    char *memory = malloc((count * (each + GAP) + 1) * sizeof(lanes));
    y->memory = memory;
    if (!memory) return 0;
    lanes *at = (lanes *)(((uintptr_t)memory + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes));
    for (int i = 0; i < count; i++, at += GAP) {
        *parts[i] = at;
        at += each;
        GUARD(at);
    }
    return 1;
}

INLINE mask is_equal(const Path *y, int64_t i) { return y->lower[i] == y->upper[i]; }
INLINE mask has_lower(const Path *y, int64_t i) { return (y->lower[i] > -INFINITY) & ~is_equal(y, i); }
INLINE mask has_upper(const Path *y, int64_t i) { return (y->upper[i] < INFINITY) & ~is_equal(y, i); }
INLINE mask is_free(const Path *y, int64_t i) {
    return (y->lower[i] == -INFINITY) & (y->upper[i] == INFINITY);
}

/* The rows times z, lengths 1; then z itself, where it has bounds */
PART void apply_path(const Path *y, const lanes *z, int sign, lanes *out) {
    for (int64_t i = 0; i < y->rows; i += TILE) {
        apply(y->p, z, i, sign, out + i);
        for (int t = 0; t < TILE; t++) out[i + t] /= y->norm[i + t];
    }
    for (int64_t k = 0; k < y->all - y->rows; k++) out[y->rows + k] = z[k];
}

/* to ← factor·v + the adjoint of the rows */
PART void adjoint_path(const Path *y, const lanes *nu, lanes factor, lanes *to) {
    lanes sum[TILE], *scaled = y->x->trial;
    for (int64_t i = 0; i < y->rows; i++) scaled[i] = nu[i] / y->norm[i];
    for (int64_t k = 0; k < y->p->outputs; k += TILE) {
        adjoint(y->p, scaled, k, sum);
        for (int t = 0; t < TILE; t++) {
            const lanes v = y->x->v[k + t];
            to[k + t] = choose(is_infinite(v), all(0.0), factor * v) + sum[t];
            if (y->all > y->rows) to[k + t] += nu[y->rows + k + t];
        }
    }
}

/* Held outputs stand still where they are held; to the path they have no bounds. */
INLINE void hold_path(Path *y, lanes *z) {
    Sides *x = y->x;
    if (!any(x->held)) return;
    for (int64_t k = 0; k < y->p->given; k++) {
        const mask held = is_infinite(x->v[k]);
        lanes end = choose(x->v[k] > 0.0, all(highest_end(y->p, k)), all(lowest_end(y->p, k)));
        if (y->all > y->rows) end = at_most(at_least(end, x->floor[k]), x->ceiling[k]);
        z[k] = choose(held, end, z[k]);
        x->w[k] = choose(held, all(0.0), x->w[k]);
    }
}

/* C z where t and ν are */
PART void evaluate_path(Path *y) {
    Sides *x = y->x;
    if (y->line) { /* r = r(0) + Q ν, with r(0) in `moved` */
        for (int64_t j = 0; j < y->rows; j++) x->change[j] = y->nu[j] / y->norm[j];
        respond(y->line, x, x->change, y->r);
        for (int64_t j = 0; j < y->rows; j++) y->r[j] = y->moved[j] + y->r[j] / y->norm[j];
        return;
    }
    adjoint_path(y, y->nu, y->t, x->u);
    for (int64_t k = 0; k < y->p->outputs; k++) {
        Output out = activate_output(y->p, k, x->u[k]);
        x->z[k] = out.z;
        x->w[k] = out.slope;
    }
    hold_path(y, x->z);
    apply_path(y, x->z, 1, y->r);
}

/* Sides and slacks near σ(t v), and units of slacks and multipliers; `most` is the largest |z|. */
PART void begin_path(Path *y, lanes most) {
    Sides *x = y->x;
    lanes far = all(0.0), steepest = all(0.0);
    y->t = y->dt = all(1.0);
    if (y->p->bending) {
        for (int64_t k = 0; k < y->p->given; k++)
            far = larger(far, choose(is_infinite(x->v[k]), all(0.0), absolute(x->v[k])));
        y->t = at_most(FIRST_LOGIT / at_least(far, all(TINY)), all(1.0));
    }
    memset(y->nu, 0, y->all * sizeof *y->nu);
    evaluate_path(y);
    for (int64_t k = 0; !y->line && k < y->p->given; k++) {
        steepest = larger(steepest, x->w[k]);
        most = larger(most, absolute(x->z[k]));
    }
    far = all(0.0);
    for (int64_t i = 0; i < y->all; i++)
        far = larger(far, larger(y->lower[i] - y->r[i], y->r[i] - y->upper[i]));
    far = larger(far, 1e-6 * most);
    far = choose(far > NONE, far, all(1.0));
    y->unit_z = y->p->bending ? steepest : far;
    y->unit_u = y->p->bending ? all(1.0) : y->line ? far : far / steepest;
    for (int64_t i = 0; i < y->all; i++) {
        mask low = has_lower(y, i), high = has_upper(y, i);
        lanes room = smaller(y->unit_z, choose(low & high, 0.5 * (y->upper[i] - y->lower[i]), all(INFINITY)));
        lanes inside = choose(low, at_least(y->r[i], y->lower[i] + room), y->r[i]);
        inside = choose(high, at_most(inside, y->upper[i] - room), inside);
        y->below[i] = choose(low, larger(inside - y->lower[i], room), all(1.0));
        y->above[i] = choose(high, larger(y->upper[i] - inside, room), all(1.0));
        y->up[i] = within(low, y->unit_z * y->unit_u / y->below[i]);
        y->down[i] = within(high, y->unit_z * y->unit_u / y->above[i]);
        y->nu[i] = y->up[i] - y->down[i];
    }
    evaluate_path(y);
}

/* The mean of slack times multiplier; `ahead`, after a step of this length */
INLINE lanes mean_gap(const Path *y, int ahead, lanes length) {
    lanes total = all(0.0), count = all(0.0);
    for (int64_t i = 0; i < y->all; i++) {
        mask low = has_lower(y, i), high = has_upper(y, i);
        lanes below = y->below[i], above = y->above[i], up = y->up[i], down = y->down[i];
        if (ahead) {
            below += length * y->d_below[i];
            above += length * y->d_above[i];
            up += length * y->d_up[i];
            down += length * y->d_down[i];
        }
        total += within(low, up * below) + within(high, down * above);
        count += within(low, all(1.0)) + within(high, all(1.0));
    }
    return total / at_least(count, all(1.0));
}

INLINE lanes off_lower(const Path *y, int64_t i) {
    return within(has_lower(y, i), y->r[i] - y->lower[i] - y->below[i]);
}
INLINE lanes off_upper(const Path *y, int64_t i) {
    return within(has_upper(y, i), y->upper[i] - y->r[i] - y->above[i]);
}

/* The size of each row's terms, and what is left of the conditions, relative to it */
PART lanes error_of_path(Path *y, lanes most) {
    lanes largest = all(0.0), worst = all(0.0), longest = all(0.0);
    if (y->line)
        for (int64_t i = 0; i < y->all; i++) y->size[i] = most;
    else {
        for (int64_t k = 0; k < y->p->outputs; k++) y->x->y[k] = absolute(y->x->z[k]);
        apply_path(y, y->x->y, 0, y->size);
    }
    for (int64_t i = 0; i < y->all; i++) {
        y->size[i] += within(is_equal(y, i), absolute(y->lower[i]));
        largest = larger(largest, y->size[i]);
        longest = larger(longest, absolute(y->nu[i]));
    }
    if (!y->p->bending) largest = larger(largest, y->unit_z);
    if (y->line) largest *= 1e3; /* every row by the largest */
    const lanes unit = y->unit_u + longest;
    for (int64_t i = 0; i < y->all; i++) {
        y->size[i] = at_least(y->size[i] + LEAST * largest, all(TINY));
        lanes off = within(is_equal(y, i), absolute(y->r[i] - y->lower[i]));
        off = larger(off, larger(absolute(off_lower(y, i)), absolute(off_upper(y, i))));
        lanes one = smaller(y->below[i] / y->size[i], y->up[i] / unit);
        lanes two = smaller(y->above[i] / y->size[i], y->down[i] / unit);
        lanes left = larger(within(has_lower(y, i), one), within(has_upper(y, i), two));
        worst = larger(worst, larger(off / y->size[i], left));
    }
    return worst;
}

#endif
