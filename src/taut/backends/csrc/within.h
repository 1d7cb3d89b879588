/* Inequalities and bounds, LANES samples at a time. Decided here is only that a sample is solved, by
 * the rules of solvers/chain.py; every other is left to it. */
#ifndef TAUT_WITHIN_H
#define TAUT_WITHIN_H

#include "arc.h"
#include "box.h"
#include "interior.h"

#define NEARBY 1e-3 /* from here on it is asked what is rounding */
#define PASSES 6 /* of a line: one finds the active rows, others what rounding left */

INLINE void read_side(const Plan *p, lanes *to, const void *x, int64_t first, int64_t samples,
                      int64_t single, double none) {
    read_rows(p, to, x, p->constraints, first, samples, single);
    for (int64_t i = 0; i < p->rows; i++)
        if (p->order[i] < 0) to[i] = all(none);
}

INLINE void read_bound(const Plan *p, lanes *to, const void *x, int64_t first, int64_t samples,
                       int64_t single, double none) {
    read_outputs(p, to, x, first, samples, single);
    for (int64_t k = p->given; k < p->outputs; k++) to[k] = all(none);
}

INLINE void read_both_sides(const Plan *p, const Within *s, Sides *x, int64_t first) {
    read_side(p, x->lower, s->lower, first, s->samples, s->single, -INFINITY);
    read_side(p, x->upper, s->upper, first, s->samples, s->single, INFINITY);
}

/* Sides and bounds; returns the samples in which none excludes another. */
PART mask read_sides(const Plan *p, const Within *s, Sides *x, int64_t first) {
    read_outputs(p, x->v, s->v, first, s->samples, s->single);
    read_both_sides(p, s, x, first);
    mask fine = all(0.0) == all(0.0);
    x->held = ~fine;
    for (int64_t k = 0; k < p->given; k++) x->held |= is_infinite(x->v[k]);
    for (int64_t i = 0; i < p->rows; i++)
        fine &= (x->lower[i] <= x->upper[i]) & (x->lower[i] < INFINITY) & (x->upper[i] > -INFINITY);
    if (!s->floor) return fine;
    read_bound(p, x->floor, s->floor, first, s->samples, s->single, -INFINITY);
    read_bound(p, x->ceiling, s->ceiling, first, s->samples, s->single, INFINITY);
    for (int64_t k = 0; k < p->given; k++) {
        lanes low = at_least(x->floor[k], all(s->lowest[k]));
        lanes high = at_most(x->ceiling[k], all(s->highest[k]));
        fine &= (low <= high) & (low < INFINITY) & (high > -INFINITY);
    }
    return fine;
}

/* How far u may go: as far as v, and outputs that do not bend as far as the sides ask */
INLINE lanes size_of_start(const Plan *p, const Sides *x) {
    lanes most = all(0.0), size = all(p->bending ? 1.0 : 0.0);
    for (int64_t k = 0; k < p->given; k++) most = larger(most, choose(is_infinite(x->v[k]), all(0.0), absolute(x->v[k])));
    for (int64_t i = 0; p->bends && i < p->rows; i++) {
        double terms = 0.0;
        for (int64_t k = 0; k < p->given; k++)
            terms += p->absolute[i * p->outputs + k] * p->scale[k] / p->temperature[k];
        const lanes low = absolute(x->lower[i]), high = absolute(x->upper[i]);
        if (terms == 0.0) continue;
        size += (within(low < INFINITY, low) + within(high < INFINITY, high)) / terms;
    }
    return size + most;
}

/* A start that is not a number, absurdly far, or of a sign that no side allows, is worse than none. */
PART void read_start(const Plan *p, const Within *s, Sides *x, int64_t first) {
    read_rows(p, x->nu, s->start, p->constraints, first, s->samples, s->single);
    lanes far = all(0.0);
    mask finite = all(0.0) == all(0.0);
    for (int64_t i = 0; i < p->rows; i++) finite &= absolute(x->nu[i]) < INFINITY;
    for (int64_t k = 0; k < p->given; k++) {
        lanes sum = all(0.0);
        for (int64_t i = 0; i < p->rows; i++)
            sum += p->absolute[i * p->outputs + k] * absolute(x->nu[i]);
        far = larger(far, sum);
    }
    finite &= far <= s->rules->far * size_of_start(p, x);
    for (int64_t i = 0; i < p->rows; i++) {
        mask none = ((x->lower[i] == -INFINITY) & (x->nu[i] > 0.0)) |
                    ((x->upper[i] == INFINITY) & (x->nu[i] < 0.0));
        x->nu[i] = choose(finite & ~none, x->nu[i], all(0.0));
    }
}

/* The same beside held outputs; x->y and x->more are free here. */
PART mask asks_for_end_beside(const Plan *p, const Within *s, const Sides *x) {
    for (int64_t k = 0; k < p->given; k++) {
        lanes low = all(s->lowest[k]), high = all(s->highest[k]);
        lanes floor = s->floor ? at_least(low, x->floor[k]) : low;
        lanes ceiling = s->floor ? at_most(high, x->ceiling[k]) : high;
        const mask down = x->v[k] == -INFINITY, up = x->v[k] == INFINITY;
        x->y[k] = choose(down, floor, choose(up, ceiling, low));
        x->more[k] = choose(down, floor, choose(up, ceiling, high));
    }
    return meets_end(p, x->y, x->more, x->lower, x->upper, s->slack);
}

/* Where a row asks for an end of what it can come to, or for more: see held.py */
INLINE mask asks_for_end(const Plan *p, const Within *s, const Sides *x) {
    mask found = all(0.0) != all(0.0);
    for (int64_t i = 0; i < p->rows; i++) {
        if (p->order[i] < 0) continue;
        found |= x->upper[i] <= p->least[i] + s->slack * p->least_terms[i];
        found |= x->lower[i] >= p->most[i] - s->slack * p->most_terms[i];
    }
    return any(x->held) ? pick_mask(x->held, asks_for_end_beside(p, s, x), found) : found;
}

/* The equations alone, where a bound holds an output and they have no solution without it: a step of
 * Newton's method from 0, which is all the way where σ is a line. */
PART void begin_anew(const Plan *p, const Within *s, Sides *x, mask anew) {
    mask dependent;
    for (int64_t k = 0; k < p->outputs; k++) {
        const mask held = is_infinite(x->v[k]);
        Output out = activate_output(p, k, choose(held, all(0.0), x->v[k]));
        if (s->floor) out.z = choose(held, choose(x->v[k] > 0.0, x->ceiling[k], x->floor[k]), out.z);
        x->w[k] = choose(held, all(0.0), out.slope);
        x->more[k] = out.z;
    }
    apply_all(p, x->more, 1, x->trial);
    for (int64_t i = 0; i < p->rows; i++) {
        const mask inside = i < s->equations && p->order[i] >= 0 ? anew : anew & ~anew;
        x->orthant[i] = choose(inside, all(1.0), all(0.0));
        x->change[i] = choose(inside, x->trial[i] - x->lower[i], all(0.0));
    }
    solve_active(p, NULL, x, s->rules, x->change, &dependent);
    for (int64_t i = 0; i < p->rows; i++)
        x->nu[i] = choose(anew, choose(absolute(x->step[i]) < INFINITY, -x->step[i], all(0.0)), x->nu[i]);
}

/* The solution of the equations alone is in z, u and the multipliers: where it keeps the rest, that
 * is the answer. Returns the samples that it is for; `open` becomes those to work on. */
PART mask begin(const Plan *p, const Within *s, Sides *x, int64_t first, mask *open) {
    mask had = *open & ~*open;
    for (int l = 0; l < LANES; l++) had[l] = -(s->status[sample(first, l, s->samples)] == 0);
    read_rows(p, x->nu, s->multipliers, p->constraints, first, s->samples, s->single);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    read_outputs(p, x->z, s->z, first, s->samples, s->single);
    const mask anew = x->held & ~had;
    if (any(anew)) {
        begin_anew(p, s, x, anew);
        for (int64_t k = 0; k < p->outputs; k++) {
            x->u[k] = choose(anew, x->v[k], x->u[k]);
            x->z[k] = choose(anew, all(0.0), x->z[k]);
        }
    }
    apply_all(p, x->z, 1, x->r);
    mask kept = *open & had & keeps(p, x, 2.0 * EPS, s->equations);
    for (int64_t k = 0; s->floor && k < p->given; k++)
        kept &= (x->z[k] >= x->floor[k]) & (x->z[k] <= x->ceiling[k]);
    *open &= (had | x->held) & ~kept;
    return kept;
}

/* z −= W C_Fᵀ H⁻¹s_F where `which`, if that is better: `_corrected` of solvers/sides.py. C z is kept
 * up. */
PART void correct(const Plan *p, const Within *s, Sides *x, mask which, double room) {
    lanes before = all(0.0), after = all(0.0), sum[TILE];
    mask dependent;
    for (int64_t i = 0; i < p->rows; i++) {
        mask active = which & is_active(x, i);
        x->orthant[i] = choose(active, all(1.0), all(0.0));
        lanes side = held_side(x->nu[i], x->lower[i], x->upper[i]);
        x->change[i] = choose(active, x->r[i] - side, all(0.0));
        before = larger(before, absolute(x->change[i]) / x->size[i]);
    }
    solve_active(p, x->boxed ? NULL : s->line, x, s->rules, x->change, &dependent);
    const int64_t count = list_pairs(p, x->step, x->pairs);
    mask inside = which;
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        adjoint_of(p, x->step, x->pairs, count, k, sum);
        for (int t = 0; t < TILE; t++) {
            lanes size = absolute(x->v[k + t]);
            for (int64_t i = 0; i < p->kept; i++)
                size += p->absolute[i * p->outputs + k + t] * absolute(x->nu[i]);
            inside &= absolute(sum[t]) <= room * EPS * size; /* else it is a step, and z not σ(u) */
            x->y[k + t] = x->z[k + t] - x->w[k + t] * sum[t];
        }
    }
    for (int64_t k = 0; k < p->given; k++) {
        if (x->boxed) x->y[k] = at_most(at_least(x->y[k], x->floor[k]), x->ceiling[k]);
        inside &= (x->y[k] >= s->lowest[k]) & (x->y[k] <= s->highest[k]);
    }
    apply_all(p, x->y, 1, x->trial);
    for (int64_t i = 0; i < p->rows; i++) {
        lanes side = held_side(x->nu[i], x->lower[i], x->upper[i]);
        lanes left = choose(x->orthant[i] != 0.0, x->trial[i] - side, all(0.0));
        after = larger(after, absolute(left) / x->size[i]);
    }
    mask better = inside & (after < before);
    for (int64_t k = 0; k < p->outputs; k++) x->z[k] = choose(better, x->y[k], x->z[k]);
    for (int64_t i = 0; i < p->rows; i++) x->r[i] = choose(better, x->trial[i], x->r[i]);
}

/* Corrections, up to three, until every row keeps the rule: `refined` of solvers/sides.py */
PART void refine(const Plan *p, const Within *s, Sides *x, mask which) {
    for (int time = 0; time < 3 && any(which); time++) {
        correct(p, s, x, which, time ? 2.0 : 28.0);
        which &= ~keeps(p, x, s->rules->rough, 0);
    }
}

/* Which samples are solved: `_converged` of solvers/arc.py */
PART mask is_optimal(const Plan *p, const Within *s, Sides *x, mask open, lanes plain, lanes stalls) {
    const Rules *r = s->rules;
    mask done = open & (plain <= s->target), near = open & ~done & (plain < NEARBY);
    if (!any(near)) return done;
    lanes fair, rough;
    rounding_levels(p, x, &fair, &rough);
    mask stopped = (rough <= 4.0 * EPS) | ((rough <= r->rough) & (stalls > 1.0));
    return done | (near & (fair <= r->fair) & stopped);
}

/* Multipliers that cannot be told from 0 are 0, if the conditions hold as well without them:
 * `tidied` of solvers/chain.py. `level` is that with them. */
PART void tidy(const Plan *p, const Within *s, Sides *x, mask done, lanes level) {
    const Rules *r = s->rules;
    lanes blur = all(0.0), fair, rough;
    mask some = done & ~done;
    for (int64_t k = 0; k < p->given; k++)
        blur = farther(blur, choose(is_infinite(x->v[k]), all(0.0), absolute(x->v[k]) + absolute(x->u[k])));
    memcpy(x->old_nu, x->nu, p->rows * sizeof *x->nu);
    for (int64_t i = 0; i < p->rows; i++) {
        mask idle = done & (x->nu[i] != 0.0) & (x->lower[i] != x->upper[i]);
        idle &= absolute(x->nu[i]) * p->largest[i] <= r->idle * ((p->bending ? 1.0 : 0.0) + blur);
        x->nu[i] = choose(idle, all(0.0), x->nu[i]);
        some |= idle;
    }
    if (!any(some)) return;
    memcpy(x->old_u, x->u, p->outputs * sizeof *x->u);
    memcpy(x->old_z, x->z, p->outputs * sizeof *x->z);
    evaluate_sides(p, x);
    lanes plain = plain_level(p, x);
    rounding_levels(p, x, &fair, &rough);
    mask fine = some & (((fair <= r->fair) & (rough <= r->rough)) | (plain <= level));
    for (int64_t i = 0; i < p->rows; i++) x->nu[i] = choose(fine, x->nu[i], x->old_nu[i]);
    if (any(fine)) refine(p, s, x, fine);
    for (int64_t k = 0; k < p->outputs; k++) {
        x->u[k] = choose(fine, x->u[k], x->old_u[k]);
        x->z[k] = choose(fine, x->z[k], x->old_z[k]);
    }
    apply_all(p, x->z, 1, x->r);
}

/* Steps, until each sample is solved or given up; returns which are solved, and how well. */
PART mask iterate(const Plan *p, const Within *s, Sides *x, mask open, lanes *iterations,
                  lanes *level) {
    lanes best = all(INFINITY), stalls = all(0.0);
    mask solved = open & ~open;
    for (int64_t pass = 0; any(open); pass++) {
        lanes plain = plain_level(p, x);
        stalls = choose(plain < 0.5 * best, all(0.0), stalls + 1.0);
        best = at_most(best, plain);
        mask done = is_optimal(p, s, x, open, plain, stalls);
        *level = choose(done, plain, *level);
        solved |= done;
        open &= ~done & (plain < INFINITY);
        const int straight = s->line && !x->boxed;
        if (!any(open) || pass == (straight ? PASSES : s->limit)) break;
        find_noise(p, x);
        if (straight) {
            descend_line(s, x, &open, iterations);
            evaluate_sides(p, x);
        } else {
            *iterations += choose(open, all(1.0), all(0.0));
            descend_arc(p, s, x, plain, &open);
        }
    }
    return solved;
}

/* Does all that is to be returned fit the dtype, and |C||z|, whose size is asked for? */
INLINE mask are_finite(const Plan *p, const Within *s, const Sides *x) {
    lanes largest = all(0.0);
    double most = 1.0;
    for (int64_t i = 0; i < p->rows; i++) {
        largest = larger(largest, absolute(x->nu[i]));
        most = p->sizes[i] > most ? p->sizes[i] : most;
    }
    for (int64_t k = 0; k < p->given; k++) {
        lanes u = choose(is_infinite(x->v[k]), all(0.0), absolute(x->u[k])); /* it stays infinite */
        largest = larger(largest, larger(u, absolute(x->z[k])));
    }
    return most * largest <= s->huge;
}

/* What is returned, in the dtype of v; the answers of the equations alone, where they are `kept` */
PART void write_answers(const Plan *p, Within *s, Sides *x, int64_t first, mask solved, mask kept,
                        lanes iterations) {
    if (s->single) { /* the violation is that of z as it will be returned */
        for (int64_t k = 0; k < p->outputs; k++)
            for (int l = 0; l < LANES; l++) x->z[k][l] = (float)x->z[k][l];
        apply_all(p, x->z, 1, x->r);
    }
    lanes residual = choose(solved | kept, violation(p, x), all(INFINITY));
    write_rows(p, x->nu, s->multipliers, first, s->samples, s->single);
    write_outputs(p, x->u, s->u, first, s->samples, s->single);
    write_outputs(p, x->z, s->z, first, s->samples, s->single);
    for (int l = 0; l < LANES && first + l < s->samples; l++) {
        if (!kept[l]) s->iterations[first + l] = (int64_t)iterations[l];
        put(s->residual, first + l, s->single, residual[l]);
        s->status[first + l] = solved[l] || kept[l] ? 0 : -1;
        if (x->held[l] && !s->status[first + l]) __atomic_store_n(&s->held, 1, __ATOMIC_RELAXED);
        if (!s->status[first + l]) __atomic_fetch_sub(&s->unsolved, 1, __ATOMIC_RELAXED);
    }
}

/* From ν to answers, by Newton's method, with `path` after the interior point method; returns the
 * samples that have them. */
PART mask attempt(const Plan *p, const Within *s, Sides *x, Path *path, int64_t first, mask open,
                  lanes *iterations) {
    lanes level = all(INFINITY);
    const int made = x->boxed && !s->floor; /* of rows */
    mask worked = open;
    if (made) open = make_box(p, s, x, open);
    if (path) open &= find_by_path(p, s, x, path, open, iterations);
    if (path || !s->begun || !s->line || x->boxed || s->single)
        evaluate_sides(p, x);
    else /* u, z and C z are those of the equations alone */
        for (int64_t k = 0; k < p->outputs; k++) x->w[k] = all(p->scale[k] / p->temperature[k]);
    mask solved = iterate(p, s, x, open, iterations, &level), rough = solved & (level > 4.0 * EPS);
    if (any(rough)) refine(p, s, x, rough);
    if (any(solved)) tidy(p, s, x, solved, level);
    if (made) {
        read_both_sides(p, s, x, first);
        leave_box(p, s, x, worked);
    }
    if (!any(solved)) return solved;
    solved &= keeps(p, x, s->cap, 0) & are_finite(p, s, x);
    for (int64_t i = 0; i < p->rows; i++) x->answer[i] = choose(solved, x->nu[i], x->answer[i]);
    for (int64_t k = 0; k < p->outputs; k++) {
        x->answer_u[k] = choose(solved, x->u[k], x->answer_u[k]);
        x->answer_z[k] = choose(solved, x->z[k], x->answer_z[k]);
    }
    return solved;
}

PART void within_block(const Plan *p, Within *s, Sides *x, Path *path, int64_t first) {
    mask open = read_sides(p, s, x, first), kept = open & ~open, solved = kept;
    lanes iterations = all(0.0);
    open &= ~asks_for_end(p, s, x);
    memset(x->nu, 0, p->rows * sizeof *x->nu);
    memcpy(x->u, x->v, p->outputs * sizeof *x->u); /* what is returned where there is no answer */
    memset(x->z, 0, p->outputs * sizeof *x->z);
    if (s->begun)
        kept = begin(p, s, x, first, &open);
    else if (s->start)
        read_start(p, s, x, first);
    memcpy(x->start, x->nu, p->rows * sizeof *x->nu);
    memcpy(x->answer, x->nu, p->rows * sizeof *x->nu);
    memcpy(x->answer_u, x->u, p->outputs * sizeof *x->u);
    memcpy(x->answer_z, x->z, p->outputs * sizeof *x->z);
    /* Rows of one entry are bounds, but rows where σ is a line: that is faster. */
    x->boxed = s->floor || (s->only && !s->line);
    int stage = 0;
    for (; stage < 2 && any(open); stage++) {
        memcpy(x->nu, x->start, p->rows * sizeof *x->nu);
        mask found = attempt(p, s, x, stage ? path : NULL, first, open, &iterations);
        solved |= found;
        open &= ~found;
    }
    x->boxed = s->floor != NULL;
    memcpy(x->nu, x->answer, p->rows * sizeof *x->nu);
    memcpy(x->u, x->answer_u, p->outputs * sizeof *x->u);
    memcpy(x->z, x->answer_z, p->outputs * sizeof *x->z);
    if (!s->single && (stage > 1 || any(kept))) apply_all(p, x->z, 1, x->r);
    write_answers(p, s, x, first, solved, kept, iterations);
}

#endif
