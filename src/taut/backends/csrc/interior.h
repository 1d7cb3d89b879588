/* The interior point method of solvers/interior.py, for samples whose active rows Newton does not
 * find: rows that depend on each other, many bounds. */
#ifndef TAUT_INTERIOR_H
#define TAUT_INTERIOR_H

#include "path.h"

#define FASTER 3.0  /* growth of t, a step */
#define LEAP 4.0    /* how far u may move in a step */
#define NEARLY 0.99 /* of the way to the next slack or multiplier that would be 0 */
#define LOOSE 0.03  /* how far C z may be from what was predicted while t moves */
#define CLOSE 1e-8  /* from here on it is Newton's again */

/* Θ, and C W Cᵀ + Θ factorised; bounds on z are eliminated: w ← w Θ/(w + Θ). */
PART void factorise_path(Path *y) {
    Sides *x = y->x;
    const int64_t n = y->rows;
    mask dependent;
    for (int64_t i = 0; i < y->all; i++) {
        lanes lift = within(has_lower(y, i), y->up[i] / y->below[i]);
        lift += within(has_upper(y, i), y->down[i] / y->above[i]);
        lanes theta = choose(is_free(y, i), all(1e30), 1.0 / at_least(lift, all(1e-30)));
        y->theta[i] = within(~is_equal(y, i), theta);
    }
    if (!y->line) {
        for (int64_t k = 0; k < y->p->outputs; k++) {
            x->more[k] = x->w[k];
            if (y->all > n) x->more[k] *= y->theta[n + k] / (x->w[k] + y->theta[n + k]);
        }
        for (int64_t i = 0; i < n; i++) x->some[i] = i;
        form_union(y->p, x, x->more, n);
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++) {
            const double scale = 1.0 / (y->norm[i] * y->norm[j]);
            const int64_t at = triangle(i) + j;
            x->own[at] = scale * (y->line ? all(y->line->q[i * n + j]) : x->gram[at]);
            if (i == j) x->own[at] += y->theta[i] + 1e-14 * x->own[at] + TINY;
        }
    factorise_own(n, x->own, x->diagonal, 1e-14, &dependent);
}

/* d ← (C W Cᵀ + Θ)⁻¹d */
PART void solve_path(Path *y) {
    Sides *x = y->x;
    const int64_t n = y->rows;
    for (int64_t i = 0; i < y->all; i++) y->d[i] = within(~is_free(y, i), y->d[i]);
    if (y->all > n) {
        for (int64_t k = 0; k < y->p->outputs; k++)
            x->more[k] = x->w[k] * y->d[n + k] / (x->w[k] + y->theta[n + k]);
        for (int64_t i = 0; i < n; i += TILE) {
            lanes sum[TILE];
            apply(y->p, x->more, i, 1, sum);
            for (int t = 0; t < TILE; t++) y->d[i + t] -= sum[t] / y->norm[i + t];
        }
    }
    solve_own(n, x->own, x->diagonal, y->d);
    for (int64_t i = 0; i < n; i++) y->d[i] = within(~is_free(y, i), y->d[i]);
    if (y->all == n) return;
    lanes sum[TILE];
    for (int64_t i = 0; i < n; i++) x->trial[i] = y->d[i] / y->norm[i];
    for (int64_t k = 0; k < y->p->outputs; k += TILE) {
        adjoint(y->p, x->trial, k, sum);
        for (int t = 0; t < TILE; t++) {
            const int64_t i = n + k + t;
            lanes found = (y->d[i] - x->w[k + t] * sum[t]) / (x->w[k + t] + y->theta[i]);
            y->d[i] = within(~is_free(y, i), found);
        }
    }
}

/* The direction in which slack times multiplier changes by the goals: `move` of interior.py. How u
 * moves is in old_u. */
PART void find_move(Path *y) {
    Sides *x = y->x;
    for (int64_t i = 0; i < y->all; i++) {
        lanes low = (y->goal_low[i] - y->up[i] * off_lower(y, i)) / y->below[i];
        lanes high = (y->goal_high[i] - y->down[i] * off_upper(y, i)) / y->above[i];
        lanes pull = within(has_lower(y, i), low) - within(has_upper(y, i), high);
        y->d[i] = choose(is_equal(y, i), y->lower[i] - y->r[i], y->theta[i] * pull);
        if (!y->line) y->d[i] -= y->moved[i];
    }
    solve_path(y);
    if (y->line) {
        for (int64_t j = 0; j < y->rows; j++) x->change[j] = y->d[j] / y->norm[j];
        respond(y->line, x, x->change, y->dr);
        for (int64_t j = 0; j < y->rows; j++) y->dr[j] /= y->norm[j];
    } else {
        adjoint_path(y, y->d, y->dt, x->old_u);
        for (int64_t k = 0; k < y->p->outputs; k++) x->more[k] = x->w[k] * x->old_u[k];
        apply_path(y, x->more, 1, y->dr);
    }
    for (int64_t i = 0; i < y->all; i++) {
        const mask low = has_lower(y, i), high = has_upper(y, i), both = low & high;
        const lanes d = y->d[i], goal_low = y->goal_low[i], goal_high = y->goal_high[i];
        lanes below = y->dr[i] + off_lower(y, i), above = off_upper(y, i) - y->dr[i];
        lanes up = (goal_low - y->up[i] * below) / y->below[i];
        lanes down = (goal_high - y->down[i] * above) / y->above[i];
        lanes lift_low = within(low, y->up[i] / y->below[i]);
        lanes lift_high = within(high, y->down[i] / y->above[i]);
        /* The nearly inactive side by its own formula, the other from dν: nothing cancels. */
        mask nearer = lift_low >= lift_high;
        y->d_up[i] = choose(both, choose(nearer, d + down, up), within(low, d));
        y->d_down[i] = choose(both, choose(nearer, down, up - d), within(high, -d));
        lanes tight = (goal_low - y->below[i] * y->d_up[i]) / at_least(y->up[i], all(TINY));
        y->d_below[i] = within(low, choose(lift_low > 1.0, tight, below));
        tight = (goal_high - y->above[i] * y->d_down[i]) / at_least(y->down[i], all(TINY));
        y->d_above[i] = within(high, choose(lift_high > 1.0, tight, above));
    }
}

/* The longest step, up to 1, in which all stays positive and u moves not too far */
PART lanes longest_step(const Path *y, double part) {
    lanes length = all(INFINITY);
    for (int64_t i = 0; i < y->all; i++) {
        const lanes from[4] = {y->below[i], y->above[i], y->up[i], y->down[i]};
        const lanes by[4] = {y->d_below[i], y->d_above[i], y->d_up[i], y->d_down[i]};
        for (int q = 0; q < 4; q++)
            length = smaller(choose(by[q] < 0.0, -part * from[q] / by[q], all(INFINITY)), length);
    }
    for (int64_t k = 0; y->p->bending && k < y->p->given; k++) {
        lanes reach = LEAP * (1.0 + 0.25 * absolute(y->x->u[k]));
        length = smaller(reach / at_least(absolute(y->x->old_u[k]), all(TINY)), length);
    }
    return smaller(length, all(1.0));
}

/* How much of this length keeps to what is predicted of C z: `_advance` of interior.py */
PART lanes judge_length(Path *y, lanes length, mask open) {
    Sides *x = y->x;
    lanes curve = all(0.0), slop = all(0.0), *off = y->goal_low;
    for (int64_t i = 0; i < y->all; i++) {
        lanes theta = within(~is_equal(y, i) & ~is_free(y, i), y->theta[i]);
        curve += y->d[i] * (y->dr[i] + theta * y->d[i]);
        slop += 1e-12 * absolute(y->d[i]) * y->size[i];
    }
    curve = absolute(curve);
    for (int time = 0; time < 20; time++) {
        lanes excess = all(0.0), farthest = all(0.0), largest = all(0.0);
        for (int64_t k = 0; k < y->p->outputs; k++) {
            lanes z = activate_output(y->p, k, x->u[k] + length * x->old_u[k]).z;
            x->more[k] = z;
        }
        hold_path(y, x->more);
        for (int64_t k = 0; k < y->p->outputs; k++) x->y[k] = absolute(x->more[k]);
        apply_path(y, x->more, 1, off);
        apply_path(y, x->y, 0, y->goal_high);
        for (int64_t i = 0; i < y->all; i++) {
            off[i] -= y->r[i] + length * y->dr[i];
            excess += y->d[i] * off[i];
            farthest = larger(farthest, absolute(off[i]));
            largest = larger(largest, y->goal_high[i] + y->size[i]);
        }
        mask steep = absolute(excess) <= 0.7 * length * curve + slop;
        mask moving = y->dt > 0.0;
        mask good = (moving & (farthest <= LOOSE * largest)) | (~moving & steep);
        if (!any(open & ~good)) break;
        length = choose(good, length, 0.4 * length);
    }
    return length;
}

/* Mehrotra's predictor and corrector, with one factor */
PART void step_path(Path *y, mask open) {
    Sides *x = y->x;
    if (!y->line) {
        y->dt = smaller(y->t * (FASTER - 1.0), 1.0 - y->t);
        for (int64_t k = 0; k < y->p->outputs; k++)
            x->more[k] = choose(is_infinite(x->v[k]), all(0.0), y->dt * x->w[k] * x->v[k]);
        apply_path(y, x->more, 1, y->moved);
    }
    factorise_path(y);
    for (int64_t i = 0; i < y->all; i++) {
        y->goal_low[i] = -y->up[i] * y->below[i];
        y->goal_high[i] = -y->down[i] * y->above[i];
    }
    lanes gap = mean_gap(y, 0, all(0.0));
    find_move(y);
    lanes length = longest_step(y, 1.0);
    lanes ratio = at_least(at_most(mean_gap(y, 1, length) / at_least(gap, all(TINY)), all(1.0)), all(0.0));
    lanes centring = choose(length < 0.1, all(1.0), ratio * ratio * ratio);
    centring = choose(y->t < 1.0, at_least(centring, all(0.1)), centring);
    for (int64_t i = 0; i < y->all; i++) {
        const lanes second = length * length;
        y->goal_low[i] += centring * gap - second * y->d_up[i] * y->d_below[i];
        y->goal_high[i] += centring * gap - second * y->d_down[i] * y->d_above[i];
    }
    find_move(y);
    length = longest_step(y, NEARLY);
    if (y->p->bending) length = judge_length(y, length, open);
    length = within(open, length);
    if (!y->line) {
        lanes t = y->t + length * y->dt;
        y->t = choose(t > 1.0 - 1e-12, all(1.0), t);
    }
    for (int64_t i = 0; i < y->all; i++) {
        y->below[i] += within(open, length * y->d_below[i]);
        y->above[i] += within(open, length * y->d_above[i]);
        y->up[i] += within(open, length * y->d_up[i]);
        y->down[i] += within(open, length * y->d_down[i]);
        lanes nu = choose(is_equal(y, i), y->nu[i] + length * y->d[i], y->up[i] - y->down[i]);
        y->nu[i] = choose(open, nu, y->nu[i]);
    }
    evaluate_path(y);
    for (int64_t i = 0; i < y->all; i++) {
        lanes room = y->r[i] - y->lower[i];
        mask roomy = open & has_lower(y, i) & (room > y->below[i]);
        y->below[i] = choose(roomy, smaller(room, 2.0 * y->below[i]), y->below[i]);
        room = y->upper[i] - y->r[i];
        roomy = open & has_upper(y, i) & (room > y->above[i]);
        y->above[i] = choose(roomy, smaller(room, 2.0 * y->above[i]), y->above[i]);
    }
}

/* Follow the path where `open`; returns where its end was reached. ν is then in units of the rows
 * given, with 0 in those that look inactive. */
PART mask follow_path(Path *y, mask open, int64_t limit, lanes most, lanes *iterations) {
    mask reached = open & ~open;
    begin_path(y, most);
    for (int64_t step = 0; any(open); step++) {
        lanes error = error_of_path(y, most);
        mask done = open & (error <= CLOSE) & (y->t == 1.0);
        reached |= done;
        open &= ~done & (error < INFINITY);
        if (!any(open) || step == limit) break;
        *iterations += within(open, all(1.0));
        step_path(y, open);
    }
    for (int64_t i = 0; i < y->rows; i++) {
        mask low = has_lower(y, i) & (y->up[i] * y->unit_z > y->below[i] * y->unit_u);
        mask high = has_upper(y, i) & (y->down[i] * y->unit_z > y->above[i] * y->unit_u);
        lanes nu = within(is_equal(y, i) | low | high, y->nu[i]);
        nu = within(~((low & ~high & (nu < 0.0)) | (high & ~low & (nu > 0.0))), nu);
        y->nu[i] = nu / y->norm[i];
    }
    return reached;
}

/* ν from the end of the path, for Newton to polish, where `which`; returns where there is one. */
PART mask find_by_path(const Plan *p, const Within *s, Sides *x, Path *y, mask which,
                       lanes *iterations) {
    if (!y->memory && !make_path(p, y)) return which & ~which;
    const Line *line = x->boxed ? NULL : s->line;
    const int64_t E = line ? line->equations : 0;
    lanes most = all(0.0);
    y->p = p;
    y->line = line;
    y->x = x;
    y->rows = p->rows - E;
    y->all = y->rows + (x->boxed ? p->outputs : 0);
    y->norm = line ? line->norm : s->norm;
    for (int64_t i = 0; i < y->rows; i++) {
        y->lower[i] = x->lower[E + i] / y->norm[i];
        y->upper[i] = x->upper[E + i] / y->norm[i];
    }
    for (int64_t k = 0; k < y->all - y->rows; k++) {
        const mask held = is_infinite(x->v[k]);
        y->lower[y->rows + k] = choose(held, all(-INFINITY), x->floor[k]);
        y->upper[y->rows + k] = choose(held, all(INFINITY), x->ceiling[k]);
    }
    if (line) { /* at λ, and without the rest of the residual of the equations */
        memset(x->nu + E, 0, y->rows * sizeof *x->nu);
        evaluate_sides(p, x);
        plain_level(p, x);
        memcpy(y->moved, x->r + E, y->rows * sizeof *x->r);
        eliminate_equations(line, x->s, x->step, y->moved);
        for (int64_t i = 0; i < y->rows; i++) y->moved[i] /= y->norm[i];
        for (int64_t k = 0; k < p->given; k++) most = larger(most, absolute(x->z[k]));
    }
    mask reached = follow_path(y, which, s->inner, most, iterations);
    for (int64_t i = 0; i < y->rows; i++) x->nu[E + i] = choose(reached, y->nu[i], x->nu[E + i]);
    return reached;
}

#endif
