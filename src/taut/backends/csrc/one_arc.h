/* Newton's method along projected arcs for a sample alone: solvers/arc.py, one to one. */
#ifndef TAUT_ONE_ARC_H
#define TAUT_ONE_ARC_H

#include "one.h"

#define AT_REST 3 /* iterations without progress after which a sample may have stopped */

/* z −= W C_Fᵀ H⁻¹s_F, and ν and u with it, to `tried`; is it a better one? `_corrected` of sides.py */
PART int correct_one(Alone *x) {
    const int64_t M = x->rows, K = x->outputs;
    const One *of = x->of;
    const Spot *at = &x->there;
    Spot *to = &x->tried;
    int64_t n = 0;
    for (int64_t i = 0; i < M; i++)
        if (holds(x, at, i)) x->index[n++] = i;
    form_one(x, n, at->w);
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = x->index[i];
        x->own[i] = x->gram[i * n + i] * (1.0 + 1e-12) + TINY;
        x->x[i] = at->r[j] - side_of_row(x, at->nu[j], j);
    }
    sizes_of_rows(x, at, x->size);
    double before = 0.0, after = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double ratio = size_of_one(x->x[i]) / x->size[x->index[i]];
        before = ratio > before ? ratio : before;
    }
    if (!factorise_one(n, x->gram, x->own, x->factor)) return 0;
    solve_one(n, x->factor, x->x);
    for (int64_t i = 0; i < M; i++) x->change[i] = 0.0;
    for (int64_t i = 0; i < n; i++) x->change[x->index[i]] = x->x[i];
    pull_of(x, x->change, 1, x->shift);
    pull_of(x, at->nu, 0, x->blur);
    int near = 1, along = 1;
    for (int64_t k = 0; k < K; k++) {
        x->blur[k] += size_of_one(x->v[k]);
        near &= size_of_one(x->shift[k]) <= 32.0 * EPS * x->blur[k];
    }
    for (int64_t i = 0; i < M; i++) to->nu[i] = near ? at->nu[i] : at->nu[i] - x->change[i];
    visit(x, to);
    for (int64_t k = 0; k < K; k++) { /* along: z is σ(u) but for its rounding */
        const double z = clip_at(x, k, at->z[k] - at->w[k] * x->shift[k]);
        const double one = curve_at(x->p, k, at->u[k]).slope[0], two = curve_at(x->p, k, to->u[k]).slope[0];
        const double room = (one < two ? one : two) * x->blur[k];
        along &= size_of_one(z - to->z[k]) <= 32.0 * EPS * (size_of_one(at->z[k]) + room);
        x->y[k] = z;
    }
    int inside = 1;
    for (int64_t k = 0; k < K; k++) {
        const double one = curve_at(x->p, k, at->u[k]).slope[0], two = curve_at(x->p, k, to->u[k]).slope[0];
        double z = along ? x->y[k] : to->z[k];
        if (along && !near) to->u[k] = at->u[k] - x->shift[k];
        if (of->line && size_of_one(z) <= 0x1p-78 * x->blur[k] * one && x->lowest[k] <= 0.0 && x->highest[k] >= 0.0)
            z = 0.0;
        to->z[k] = z;
        to->w[k] = is_free_at(x, k, z) ? two : 0.0;
        inside &= z >= x->lowest[k] && z <= x->highest[k];
    }
    image_of(x, to->z, 1, to->r);
    for (int64_t i = 0; i < n; i++) {
        const int64_t j = x->index[i];
        const double ratio = size_of_one(to->r[j] - side_of_row(x, at->nu[j], j)) / x->size[j];
        if (!(ratio <= after)) after = ratio == ratio ? ratio : INFINITY;
        inside &= is_equation(x, j) || to->nu[j] * at->nu[j] > 0.0;
    }
    return inside && after < before;
}

/* `there` ← `here` with corrections that help, up to three, until every row keeps the rule */
PART void refine_one(Alone *x) {
    copy_spot(x, &x->there, &x->here);
    for (int time = 0; time < 3; time++) {
        if (time && keeps_rule(x, &x->there, x->of->rules->rough)) return;
        if (!correct_one(x)) return; /* and so would be the next */
        copy_spot(x, &x->there, &x->tried);
    }
}

/* step ← −H⁻¹s in the rows with `orthant` ≠ 0; do those depend on each other? */
PART int direct_one(Alone *x, double damping) {
    int64_t n = 0;
    for (int64_t i = 0; i < x->rows; i++) {
        x->step[i] = 0.0;
        if (x->orthant[i] != 0.0) x->index[n++] = i;
    }
    form_one(x, n, x->here.w);
    for (int64_t i = 0; i < n; i++) {
        x->diagonal[i] = x->gram[i * n + i];
        x->own[i] = x->diagonal[i] * (1.0 + 1e-14 + damping) + TINY;
        x->x[i] = -x->s[x->index[i]];
    }
    int found = factorise_one(n, x->gram, x->own, x->factor), broken = !found;
    for (int64_t i = 0; i < n && found; i++) {
        const double pivot = x->factor[i * n + i];
        broken |= !(pivot * pivot / x->own[i] > x->of->rules->dependent);
    }
    for (double lift = 1e-12; !found && lift < 1.0; lift *= 100.0) {
        for (int64_t i = 0; i < n; i++) x->change[i] = x->own[i] + lift * x->diagonal[i] + TINY;
        found = factorise_one(n, x->gram, x->change, x->factor);
    }
    if (!found) return 1;
    solve_one(n, x->factor, x->x);
    for (int64_t i = 0; i < n; i++) {
        if (!(size_of_one(x->x[i]) < INFINITY)) found = 0;
        x->step[x->index[i]] = x->x[i];
    }
    for (int64_t i = 0; i < x->rows && !found; i++) x->step[i] = 0.0;
    return broken;
}

/* The slope of D at the start and at the end of the chord to `there`, and what may be rounding of it */
INLINE void slopes_of_chord(const Alone *x, double *before, double *after, double *noise) {
    *before = *after = *noise = 0.0;
    for (int64_t i = 0; i < x->rows; i++) {
        const double change = x->there.nu[i] - x->here.nu[i];
        if (x->orthant[i] == 0.0) continue;
        const double side = x->orthant[i] > 0.0 ? x->lower[i] : x->upper[i];
        *before += change * x->s[i];
        *after += change * (x->there.r[i] - side);
        *noise += 4.0 * EPS * size_of_one(change) * x->rough[i];
    }
    *before = size_of_one(*before);
}

/* ν(α) = [ν + α step] in its orthant, to `there`, judged by the slope at the end of the chord */
PART void search_one(Alone *x) {
    const One *of = x->of;
    const Rules *r = of->rules;
    const int straight = of->line && !x->floor;
    double alpha = 1.0, low = 0.0, far = 0.0, before, after, noise;
    pull_of(x, x->step, 1, x->y);
    for (int64_t k = 0; k < x->outputs; k++) { /* `reach` of solvers/sides.py */
        const double by = size_of_one(x->y[k]);
        if (!x->p->bends || x->p->bends[k]) far = most_of_two(far, by);
        if (x->unit > 0.0) far = most_of_two(far, by / x->unit);
    }
    if (!straight && far > r->reach) alpha = r->reach / far;
    int growing = 1;
    for (int64_t time = 0; time < r->trials; time++) {
        for (int64_t i = 0; i < x->rows; i++) {
            const double to = x->here.nu[i] + alpha * x->step[i];
            x->there.nu[i] = is_equation(x, i) || to * x->orthant[i] > 0.0 ? to : 0.0;
        }
        visit(x, &x->there);
        slopes_of_chord(x, &before, &after, &noise);
        const int too_long = !(after <= r->overshoot * before + noise);
        const int too_short = !straight && growing && after < -r->undershoot * before;
        if (!too_long && !too_short) break;
        if (too_long) {
            double cut = before / (before + after);
            cut = cut == cut ? cut : r->cut;
            cut = cut < r->cut ? r->cut : cut > 0.5 ? 0.5 : cut;
            alpha = low + (alpha - low) * cut;
            growing = 0;
        } else {
            growing = alpha < r->longest;
            low = alpha;
            alpha *= r->growth;
        }
    }
}

/* The orthant in which each multiplier may move, 0 where it may not; an equation that has none has 2 */
INLINE void orient_one(Alone *x) {
    for (int64_t i = 0; i < x->rows; i++) {
        const double sign = x->here.nu[i] != 0.0 ? x->here.nu[i] : -x->s[i];
        x->orthant[i] = sign > 0.0 ? 1.0 : sign < 0.0 ? -1.0 : is_equation(x, i) ? 2.0 : 0.0;
        if (x->orthant[i] == 0.0) x->s[i] = 0.0;
    }
}

/* Is the sample solved, with `here` as it is to be returned? */
PART int close_one(Alone *x, double plain, double fair, double rough, int64_t stalls) {
    const Rules *r = x->of->rules;
    int stopped = rough <= 4.0 * EPS || (rough <= r->rough && stalls > 1);
    int done = plain <= x->of->target || (fair <= r->fair && stopped);
    if (!done && rough <= 4.0 * EPS && stalls >= AT_REST) { /* what is left is the rounding of u */
        refine_one(x);
        if (!keeps_rule(x, &x->there, 0.5 * r->fair)) return 0;
        copy_spot(x, &x->here, &x->there);
        done = 1;
    }
    if (done && plain > 4.0 * EPS) {
        refine_one(x);
        copy_spot(x, &x->here, &x->there);
    }
    return done;
}

/* Has the step led nowhere? Then all that follow do. */
INLINE int stands_still(const Alone *x) {
    if (!is_finite_spot(x, &x->there)) return 1;
    for (int64_t i = 0; i < x->rows; i++)
        if (x->there.nu[i] != x->here.nu[i]) return 0;
    return 1;
}

/* From `here`, at most `budget` steps */
PART int newton_one(Alone *x, int64_t *iterations, double *level) {
    const One *of = x->of;
    double best = INFINITY, plain, fair, rough;
    int64_t stalls = 0, broken = 0, still = 0;
    for (int64_t step = 0;; step++) {
        measure_rows(x, &plain, &fair, &rough);
        stalls = plain < 0.5 * best ? 0 : stalls + 1;
        best = plain < best ? plain : best;
        *iterations = step;
        *level = plain;
        if (close_one(x, plain, fair, rough, stalls)) return 1;
        if (step == of->budget || (!of->last && broken > 1) || still > AT_REST) return 0;
        orient_one(x);
        broken += direct_one(x, of->last ? 1e-4 * (plain < 1.0 ? plain : 1.0) : 0.0);
        search_one(x);
        still = stands_still(x) ? still + 1 : 0;
        if (is_finite_spot(x, &x->there)) copy_spot(x, &x->here, &x->there);
    }
}

/* A sample of the call, from where it is, and back */
PART void one_sample(One *of, Alone *x, int64_t n) {
    const int64_t M = of->rows, K = of->outputs;
    read_alone(of, x, n);
    memcpy(x->here.nu, of->multipliers + n * M, M * sizeof(double));
    visit(x, &x->here);
    if (!is_finite_spot(x, &x->here)) {
        memset(x->here.nu, 0, M * sizeof(double));
        visit(x, &x->here);
    }
    const int done = newton_one(x, &of->iterations[n], &of->level[n]);
    of->status[n] = done ? 0 : -1;
    memcpy(of->multipliers + n * M, x->here.nu, M * sizeof(double));
    memcpy(of->r + n * M, x->here.r, M * sizeof(double));
    memcpy(of->u + n * K, x->here.u, K * sizeof(double));
    memcpy(of->z + n * K, x->here.z, K * sizeof(double));
    memcpy(of->w + n * K, x->here.w, K * sizeof(double));
    __atomic_fetch_sub(&of->unsolved, 1, __ATOMIC_RELAXED);
}

#endif
