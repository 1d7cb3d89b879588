/* Newton's method along projected arcs, for any σ: `newton` of solvers/arc.py. */
#ifndef TAUT_ARC_H
#define TAUT_ARC_H

#include "active.h"

/* The orthant in which each multiplier may move, 0 where it may not; s is 0 there. */
PART void orient_all(const Plan *p, Sides *x, mask open) {
    for (int64_t i = 0; i < p->rows; i++) {
        const lanes nu = x->nu[i], s = x->s[i];
        mask equal = x->lower[i] == x->upper[i], still = (nu == 0.0) & ~equal;
        lanes sign = choose(still, choose(absolute(s) > x->noise[i], -s, all(0.0)), nu);
        sign = choose(sign > 0.0, all(1.0), choose(sign < 0.0, all(-1.0), all(0.0)));
        x->orthant[i] = choose(open, choose(equal, all(2.0), sign), all(0.0));
        x->s[i] = choose(x->orthant[i] != 0.0, s, all(0.0));
    }
}

/* max|Cᵀ step| where σ bends */
INLINE lanes reach_of_step(const Plan *p, Sides *x) {
    const int64_t count = list_pairs(p, x->step, x->pairs);
    lanes far = all(0.0), sum[TILE];
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        adjoint_of(p, x->step, x->pairs, count, k, sum);
        for (int t = 0; t < TILE; t++) far = farther_at(p, k + t, far, sum[t]);
    }
    return far;
}

/* ν(α) = [ν + α step] in its orthant, from `old_nu`, where `todo`; returns where one stopped at 0. */
INLINE mask move_along(const Plan *p, Sides *x, lanes alpha, mask todo) {
    mask stopped = todo & ~todo;
    for (int64_t i = 0; i < p->rows; i++) {
        const lanes orthant = x->orthant[i];
        lanes to = x->old_nu[i] + alpha * x->step[i];
        mask kept = (orthant == 2.0) | (to * orthant > 0.0);
        stopped |= ~kept & (to != 0.0);
        x->nu[i] = choose(todo, choose(kept, to, all(0.0)), x->nu[i]);
    }
    return stopped;
}

/* Judged by the slope of D at the end of the chord: `_search` of solvers/arc.py. Returns where the
 * whole step was taken and nothing stopped at 0; what is left in `todo` found none. */
PART mask search_arc(const Plan *p, const Within *s, Sides *x, mask *which) {
    const Rules *r = s->rules;
    mask todo = *which, growing = todo, whole = todo;
    lanes low = all(0.0), alpha = all(1.0);
    memcpy(x->old_nu, x->nu, p->rows * sizeof *x->nu);
    if (!s->line) {
        lanes far = reach_of_step(p, x);
        alpha = choose(far > r->reach, r->reach / far, alpha);
        whole &= alpha == 1.0;
    }
    for (int64_t time = 0; time < r->trials && any(todo); time++) {
        mask stopped = move_along(p, x, alpha, todo);
        evaluate_sides(p, x);
        lanes before = all(0.0), after = all(0.0), slop = all(0.0);
        for (int64_t i = 0; i < p->rows; i++) {
            lanes change = x->nu[i] - x->old_nu[i];
            lanes side = choose(x->orthant[i] > 0.0, x->lower[i], x->upper[i]);
            mask active = x->orthant[i] != 0.0;
            before += change * x->s[i];
            after += choose(active, change * (x->r[i] - side), all(0.0));
            slop += choose(active, absolute(change * side), all(0.0));
        }
        before = absolute(before);
        mask too_long = todo & ~(after <= r->overshoot * before + 1e-15 * slop);
        mask too_short = todo & growing & ~too_long & (after < -r->undershoot * before);
        if (s->line) too_short &= ~too_short;
        lanes cut = at_most(at_least(before / (before + after), all(r->cut)), all(0.5));
        cut = low + (alpha - low) * choose(cut == cut, cut, all(r->cut));
        growing = too_short & (alpha < r->longest);
        low = choose(too_short, alpha, low);
        alpha = choose(too_long, cut, choose(too_short, r->growth * alpha, alpha));
        whole &= ~(too_long | too_short | (todo & stopped));
        todo = too_long | too_short;
    }
    *which &= ~todo;
    return whole & ~todo;
}

/* step ← −H⁻¹s with the factor there is */
INLINE void find_arc(const Plan *p, Sides *x, int64_t n) {
    gather_rows(x->index, n, x->s, x->x);
    for (int64_t i = 0; i < n; i++) x->x[i] = -x->x[i];
    solve_own(n, x->own, x->diagonal, x->x);
    scatter_rows(x->index, n, x->x, x->step, p->rows);
}

/* More steps with the same factor, while the active rows stay and each gains a digit */
PART void repeat_arc(const Plan *p, const Within *s, Sides *x, int64_t n, lanes before, mask which) {
    const Rules *r = s->rules;
    lanes level = plain_level(p, x), gain = 2.0 * level / before, expected = level;
    for (int64_t time = 0; time < r->chords; time++) expected *= gain;
    which &= expected <= s->target;
    for (int64_t time = 0; time < r->chords; time++) {
        which &= level > s->target;
        for (int64_t i = 0; i < p->rows; i++) {
            mask inside = x->orthant[i] != 0.0;
            which &= inside | (absolute(x->s[i]) <= x->noise[i]);
            x->s[i] = choose(inside, x->s[i], all(0.0));
        }
        if (!any(which)) return;
        find_arc(p, x, n);
        memcpy(x->old_nu, x->nu, p->rows * sizeof *x->nu);
        for (int64_t i = 0; i < p->rows; i++) {
            mask signed_ = (x->orthant[i] == 1.0) | (x->orthant[i] == -1.0);
            which &= ~signed_ | ((x->nu[i] + x->step[i]) * x->orthant[i] > 0.0);
        }
        move_along(p, x, all(1.0), which);
        evaluate_sides(p, x);
        lanes now = plain_level(p, x);
        mask worse = which & ~(now < level);
        which &= now < r->gain * level;
        if (any(worse)) {
            for (int64_t i = 0; i < p->rows; i++)
                x->nu[i] = choose(worse, x->old_nu[i], x->nu[i]);
            evaluate_sides(p, x);
        }
        level = now;
    }
}

/* One step from a point of this level, and others with its factor; false where there is none. */
PART void descend_arc(const Plan *p, const Within *s, Sides *x, lanes level, mask *open) {
    mask dependent;
    orient_all(p, x, *open);
    const int64_t n = form_active(p, x, x->w);
    factorise_own(n, x->own, x->diagonal, s->rules->dependent, &dependent);
    find_arc(p, x, n);
    mask whole = search_arc(p, s, x, open);
    repeat_arc(p, s, x, n, level, whole);
}

#endif
