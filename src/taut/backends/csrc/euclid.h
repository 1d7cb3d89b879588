/* σ is a line, and z has no bounds: the equations are eliminated once and for all, and Newton's
 * method runs in as many dimensions as there are inequalities: l ≤ r + Q μ ≤ h. */
#ifndef TAUT_EUCLID_H
#define TAUT_EUCLID_H

#include "sides.h"

/* s ← (A W Aᵀ)⁻¹s in the rows of A, and t ← t − G W Aᵀ(A W Aᵀ)⁻¹s in those of G */
PART void eliminate_equations(const Line *line, const lanes *s, lanes *solved, lanes *t) {
    const int64_t E = line->equations, M = line->rows;
    for (int64_t i = 0; i < E; i += TILE) {
        lanes sum[TILE] = {all(0.0), all(0.0), all(0.0), all(0.0)};
        for (int64_t k = 0; k < E; k++)
#pragma GCC unroll 4
            for (int q = 0; q < TILE; q++) sum[q] += line->inverse[(i + q) * E + k] * s[k];
#pragma GCC unroll 4
        for (int q = 0; q < TILE; q++) solved[i + q] = sum[q];
    }
    for (int64_t j = 0; j < M; j += TILE) {
        lanes sum[TILE] = {all(0.0), all(0.0), all(0.0), all(0.0)};
        for (int64_t k = 0; k < E; k++)
#pragma GCC unroll 4
            for (int q = 0; q < TILE; q++) sum[q] += line->through[k * M + j + q] * s[k];
#pragma GCC unroll 4
        for (int q = 0; q < TILE; q++) t[j + q] -= sum[q];
    }
}

/* λ ← λ − (A W Aᵀ)⁻¹A W Gᵀ μ, where `which` */
PART void return_equations(const Line *line, const lanes *mu, lanes *lambda, mask which) {
    const int64_t E = line->equations, M = line->rows;
    for (int64_t i = 0; i < E; i += TILE) {
        lanes sum[TILE] = {all(0.0), all(0.0), all(0.0), all(0.0)};
        for (int64_t j = 0; j < M; j++)
#pragma GCC unroll 4
            for (int q = 0; q < TILE; q++) sum[q] += line->through[(i + q) * M + j] * mu[j];
#pragma GCC unroll 4
        for (int q = 0; q < TILE; q++)
            lambda[i + q] = choose(which, lambda[i + q] - sum[q], lambda[i + q]);
    }
}

/* step ← H⁻¹s, H = C_F W C_Fᵀ in the active rows F, which have `orthant` ≠ 0; s is 0 in the others.
 * Returns the size of what is left when equations are eliminated, and was factorised. */
PART int64_t solve_line(const Line *line, Sides *x, const Rules *r, const lanes *s, mask *dependent) {
    const int64_t E = line->equations, M = line->rows;
    memcpy(x->trial + E, s + E, M * sizeof *s);
    eliminate_equations(line, s, x->step, x->trial + E);
    const int64_t n = list_active(x->orthant, E, M, x->index);
    gather_shared(x->index, n, line->q, M, x->own);
    factorise_own(n, x->own, x->diagonal, r->dependent, dependent);
    gather_rows(x->index, n, x->trial + E, x->x);
    solve_own(n, x->own, x->diagonal, x->x);
    scatter_rows(x->index, n, x->x, x->step + E, M);
    return_equations(line, x->step + E, x->step, all(0.0) == all(0.0));
    return n;
}

/* Q times `change`, to `trial`: in pairs of which one is not 0, as others add 0 */
INLINE void respond(const Line *line, Sides *x, const lanes *change, lanes *trial) {
    const int64_t M = line->rows;
    int64_t count = 0;
    for (int64_t j = 0; j < M; j += 2)
        if (any((change[j] != 0.0) | (change[j + 1] != 0.0))) x->pairs[count++] = j;
    for (int64_t i = 0; i < M; i += TILE) {
        lanes even[TILE], odd[TILE];
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) even[t] = odd[t] = all(0.0);
        for (int64_t q = 0; q < count; q++) {
            const double *row = line->q + x->pairs[q] * M + i; /* Q is symmetric */
            const lanes one = change[x->pairs[q]], two = change[x->pairs[q] + 1];
#pragma GCC unroll 4
            for (int t = 0; t < TILE; t++) {
                even[t] += row[t] * one;
                odd[t] += row[M + t] * two;
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) trial[i + t] = even[t] + odd[t];
    }
}

/* s without what is rounding, and the orthant in which each multiplier may move. Returns where rows
 * become active; `off` is where active ones are not at their sides. `spread` is Σ|Q_jj|^½|Δμ_j|,
 * which bounds what r is summed from. */
INLINE mask orient(const Line *line, Sides *x, lanes spread, mask *off) {
    const int64_t E = line->equations;
    mask entering = all(0.0) != all(0.0);
    *off = entering;
    for (int64_t j = 0; j < line->rows; j++) {
        const int64_t i = E + j;
        lanes nu = x->nu[i], s = subgradient(nu, x->r[i], x->lower[i], x->upper[i]);
        lanes noise = x->noise[i] + 2.0 * EPS * line->root[j] * spread;
        mask equal = x->lower[i] == x->upper[i], still = (nu == 0.0) & ~equal, far = absolute(s) > noise;
        s = choose(still & ~far, all(0.0), s);
        entering |= still & far;
        *off |= ~still & far;
        lanes sign = choose(still, -s, nu);
        sign = choose(sign > 0.0, all(1.0), choose(sign < 0.0, all(-1.0), all(0.0)));
        x->orthant[i] = choose(equal, all(2.0), sign);
        x->s[i] = s;
    }
    return entering;
}

/* μ(α) = [μ + α step] in its orthant, judged by the slope of D at the end of the chord; returns where
 * the whole step was taken, and nothing stopped at 0. */
PART mask follow_arc(const Line *line, Sides *x, const Rules *r, mask todo) {
    const int64_t E = line->equations, M = line->rows;
    lanes alpha = all(1.0), *change = x->change + E, *trial = x->trial + E;
    mask whole = todo;
    for (int64_t time = 0; time < r->trials && any(todo); time++) {
        lanes before = all(0.0), after = all(0.0), slop = all(0.0);
        mask stopped = all(0.0) != all(0.0);
        for (int64_t j = 0; j < M; j++) {
            const lanes orthant = x->orthant[E + j], nu = x->nu[E + j];
            lanes to = nu + alpha * x->step[E + j];
            mask kept = (orthant == 2.0) | (to * orthant > 0.0);
            stopped |= ~kept & (to != 0.0);
            change[j] = choose(todo, choose(kept, to, all(0.0)) - nu, all(0.0));
            before += change[j] * x->s[E + j];
            slop += absolute(change[j] * x->r[E + j]);
        }
        before = absolute(before);
        respond(line, x, change, trial);
        for (int64_t j = 0; j < M; j++) after += change[j] * (x->s[E + j] + trial[j]);
        mask too_long = todo & ~(after <= r->overshoot * before + 1e-15 * slop), good = todo & ~too_long;
        for (int64_t j = 0; j < M; j++) {
            x->nu[E + j] += choose(good, change[j], all(0.0));
            x->r[E + j] += choose(good, trial[j], all(0.0));
        }
        whole &= ~(too_long | (good & stopped));
        lanes cut = at_most(at_least(before / (before + after), all(r->cut)), all(0.5));
        alpha *= choose(cut == cut, cut, all(r->cut));
        todo = too_long;
    }
    return whole & ~todo;
}

/* From ν to one that is optimal but for rounding, where `which`: false where none was found. u and z
 * must be evaluated again. */
PART void descend_line(const Within *s, Sides *x, mask *which, lanes *iterations) {
    const Line *line = s->line;
    const Rules *r = s->rules;
    const int64_t E = line->equations, M = line->rows;
    mask open = *which, whole = open & ~open, off, dependent;
    memcpy(x->old_nu, x->nu, s->plan->rows * sizeof *x->nu);
    memcpy(x->trial + E, x->r + E, M * sizeof *x->r);
    eliminate_equations(line, x->s, x->step, x->trial + E);
    for (int64_t i = 0; i < E; i++) x->nu[i] -= choose(open, x->step[i], all(0.0));
    for (int64_t j = E; j < E + M; j++) x->r[j] = choose(open, x->trial[j], x->r[j]);
    for (int64_t step = 0; any(open); step++) {
        lanes spread = all(0.0);
        for (int64_t j = 0; j < M; j++)
            spread += line->root[j] * absolute(x->nu[E + j] - x->old_nu[E + j]);
        mask entering = orient(line, x, spread, &off);
        open &= entering | (off & ~whole);
        if (!any(open) || step == s->limit) break;
        *iterations += choose(open, all(1.0), all(0.0));
        for (int64_t j = E; j < E + M; j++) { /* lanes that are done have no lists */
            x->orthant[j] = choose(open, x->orthant[j], all(0.0));
            x->s[j] = choose(x->orthant[j] != 0.0, x->s[j], all(0.0));
        }
        const int64_t n = list_active(x->orthant, E, M, x->index);
        gather_shared(x->index, n, line->q, M, x->own);
        factorise_own(n, x->own, x->diagonal, r->dependent, &dependent);
        gather_rows(x->index, n, x->s + E, x->x);
        for (int64_t i = 0; i < n; i++) x->x[i] = -x->x[i];
        solve_own(n, x->own, x->diagonal, x->x);
        scatter_rows(x->index, n, x->x, x->step + E, M);
        whole = follow_arc(line, x, r, open);
    }
    *which &= ~open;
    for (int64_t j = 0; j < M; j++) x->change[j] = x->nu[E + j] - x->old_nu[E + j];
    return_equations(line, x->change, x->nu, *which);
}

#endif
