/* Most of the way in float32, the end in float64: a group of two blocks. A sample moves by conjugate
 * gradients, preconditioned by the factor of its own A diag(w) Aᵀ, or by (A Aᵀ)⁻¹ where its slopes are
 * even. Every decision is a lane's own. What does not contract is left to newton.h. */
#ifndef TAUT_MIXED_H
#define TAUT_MIXED_H

#include "newton.h"
#include "single.h"

#define FEW 16          /* with fewer equations a factor costs less than it saves */
#define SPREAD 0.4f     /* K Σw²/(Σw)² − 1 up to which slopes are even */
#define LONGEST 3.0f    /* u moves no further in a step */
#define TOGETHER 4      /* steps until samples, if they want it, have another factor: all at once */
#define FACTORS 8.0f    /* of a sample, at most */
#define CUTS 6          /* of a step that is too long */
#define STEPS 12        /* in float64 */
#define COARSE 1e-9      /* a target above it is that of float32 */
#define LINEARLY 1e-3f  /* what u may move where z follows by two terms of its series */

/* What the lanes of a group have come to */
typedef struct {
    flags near;             /* in float32 there is nothing more to gain */
    flags moved;            /* by a step */
    flags own, factorised;  /* the preconditioner that a lane uses; is there a factor? */
    flags begin;            /* with the next step a new sequence of directions begins */
    singles rate, count;    /* gain of the last step; iterations */
    singles along, down;    /* of the step before: rᵀy; −rᵀp */
} Way;

/* The factor at the slopes now, for the lanes of `which`; the others keep theirs, to the bit. Returns
 * where there is none. */
PART flags refactorise(const Plan *p, Group *x, Way *way, flags which) {
    const int first = !some(way->factorised);
    for (int64_t k = 0; k < p->given; k++) x->at[k] = first ? x->w[k] : pick(which, x->w[k], x->at[k]);
    flags fine;
    TIMED(HESSIAN, fine = factorise_single(p, x));
    way->factorised |= which;
    way->begin |= which;
    return which & ~fine;
}

/* y, by which the next direction differs from the last, and yᵀr with r of now and of before. For lanes with
 * a factor of their own, y = (A diag(at) Aᵀ)⁻¹r. For the others it is r itself, which stands for (A Aᵀ)⁻¹r:
 * all they need is t = Aᵀ(A Aᵀ)⁻¹r, as tᵀt′ = rᵀ(A Aᵀ)⁻¹r′. */
PART void precondition(const Plan *p, Group *x, const Way *way, singles *now, singles *before) {
    const int64_t n = p->worked, K = p->given;
    const int own = some(way->own);
    *now = *before = every(0.0f);
    memcpy(x->y, x->r, n * sizeof *x->y);
    if (own) {
        solve_single(p, x, x->y);
        *now = dot_single(n, x->r, x->y);
        *before = dot_single(n, x->before, x->y);
    }
    if (!some(~way->own)) return;
    products(p->straight, K, x->r, n, x->t);
    for (int64_t i = 0; own && i < n; i++) x->y[i] = pick(way->own, x->y[i], x->r[i]);
    *now = pick(way->own, *now, dot_single(K, x->t, x->t));
    *before = pick(way->own, *before, dot_single(K, x->last, x->t));
}

/* The next direction p of the lanes of `act`, d = Aᵀp, or Aᵀ(A Aᵀ)⁻¹p where p stands for that; and how far
 * to go along it: u moves by `longest` at most. Other lanes keep their place in the sequence. */
PART singles direction(const Plan *p, Group *x, Way *way, flags act, float longest) {
    const int64_t n = p->worked, K = p->given;
    const int own = some(way->own), even = some(~way->own);
    singles now, before, down = every(0.0f);
    precondition(p, x, way, &now, &before);
    singles beta = (now - before) / way->along; /* Polak and Ribière */
    beta = pick(~way->begin & (beta > 0.0f), beta, every(0.0f));
    for (int64_t i = 0; i < n; i++) x->p[i] = pick(act, beta * x->p[i] - x->y[i], x->p[i]);
    if (own) down = -dot_single(n, x->r, x->p);
    if (even) {
        for (int64_t k = 0; k < K; k++) {
            x->d[k] = pick(act, beta * x->d[k] - x->t[k], x->d[k]);
            x->last[k] = pick(act, x->t[k], x->last[k]);
        }
        down = pick(way->own, down, -dot_single(K, x->t, x->d));
    }
    flags up = act & ~(down > 0.0f);
    for (int64_t i = 0; some(up) && i < n; i++) x->p[i] = pick(up, -x->y[i], x->p[i]);
    for (int64_t k = 0; some(up) && even && k < K; k++) x->d[k] = pick(up, -x->t[k], x->d[k]);
    down = pick(up, now, down);
    for (int64_t i = 0; own && i < n; i++) x->before[i] = pick(act, x->r[i], x->before[i]);
    if (own) adjoint_single(p, x->p, even ? x->t : x->d);
    for (int64_t k = 0; own && even && k < K; k++) x->d[k] = pick(way->own, x->t[k], x->d[k]);
    way->along = pick(act, now, way->along);
    way->down = down;
    way->begin &= ~act;
    singles far = farthest(K, x->d), by = down / curve_along(K, x->w, x->d);
    return pick(by * far <= longest, by, longest / far);
}

/* The multipliers of the lanes of `which` catch up with the steps. */
PART void catch_up(const Plan *p, Group *x, const Way *way, flags which) {
    const int64_t n = p->worked;
    memcpy(x->y, x->gone, n * sizeof *x->y);
    if (some(which & ~way->own)) products(p->inverse_single, n, x->gone, n, x->y);
    for (int64_t i = 0; i < n; i++) {
        singles moved = x->multipliers[i] + pick(way->own, x->gone[i], x->y[i]);
        x->multipliers[i] = pick(which, moved, x->multipliers[i]);
        x->gone[i] = pick(which, every(0.0f), x->gone[i]);
    }
}

INLINE void go(const Plan *p, Group *x, singles by, flags which) {
    for (int64_t i = 0; i < p->worked; i++)
        x->gone[i] = pick(which, x->gone[i] + by * x->p[i], x->gone[i]);
    for (int64_t k = 0; k < p->given; k++) x->u[k] = pick(which, x->u[k] + by * x->d[k], x->u[k]);
    TIMED(PRODUCTS, evaluate_single(p, x));
}

/* rᵀp; where p stands for another, from what zᵀd was when the step began */
INLINE singles along(const Plan *p, const Group *x, const Way *way, singles from) {
    singles left = some(way->own) ? dot_single(p->worked, x->r, x->p) : from;
    if (!some(~way->own)) return left;
    return pick(way->own, left, dot_single(p->given, x->z, x->d) - from - way->down);
}

/* One step of the lanes of `act`; returns where it is no use. */
INLINE flags take_step(const Plan *p, Group *x, Way *way, flags act) {
    singles by;
    TIMED(FACTORISATION, by = direction(p, x, way, act, LONGEST));
    const singles first = way->down, from = some(~way->own) ? dot_single(p->given, x->z, x->d) : by;
    go(p, x, by, act);
    singles left = along(p, x, way, from);
    flags longer = act & ~(left <= 0.5f * first);
    for (int cut = 0; cut < CUTS && some(longer); cut++) {
        singles part = first / (first + left);
        part = pick((part > 0.1f) & (part < 0.5f), part, pick(part >= 0.5f, every(0.5f), every(0.1f)));
        go(p, x, by * part - by, longer);
        by = pick(longer, by * part, by);
        way->begin |= longer;
        left = along(p, x, way, from);
        longer &= ~(left <= 0.5f * first);
    }
    return longer | (act & ~(x->relative < INFINITY));
}

/* After how many steps with one factor another is cheaper */
INLINE int patience(const Plan *p) {
    const double n = p->worked, K = p->given;
    return (int)(0.5 * (n * n * K / 2 + n * n * n / 6) / (2 * n * K + n * n + 25 * K) + 1.5);
}

/* What is left of `relative` after so many steps at this rate */
INLINE singles expected(singles relative, singles rate, int steps) {
    for (int i = 0; i < steps; i++) relative *= rate;
    return relative;
}

/* In float32, from where the multipliers are */
PART void approach(const Plan *p, const Solve *s, Group *x, flags open, Way *way) {
    const int loose = s->target > COARSE, few = p->worked < FEW || !loose;
    const int steps = patience(p), cheap = steps < 3;
    const float interval = cheap ? 3.0f : TOGETHER, part = cheap ? 0.2f : 0.12f;
    const float bad = loose ? 0.7f : 0.2f; /* a rate at which the next factor is not put off */
    const float enough = !loose ? 3e-6f : s->target > 2e-5 ? 0.5f * (float)s->target : 1e-5f;
    for (int64_t i = 0; i < p->worked; i++) x->p[i] = x->before[i] = x->gone[i] = every(0.0f);
    for (int64_t k = 0; k < p->given; k++) x->d[k] = x->last[k] = every(0.0f);
    adjoint_single(p, x->multipliers, x->u);
    for (int64_t k = 0; k < p->given; k++) x->u[k] += x->v[k];
    evaluate_single(p, x);
    open &= x->relative < INFINITY;
    const singles none = every(0.0f);
    *way = (Way){.near = open & (x->relative <= enough), .begin = open | ~open};
    way->own = few ? open | ~open : ~(unevenness(p, x->w) <= SPREAD);
    way->rate = every(1.0f);
    way->count = way->along = none;
    singles best = x->relative, since = none, factors = none;
    flags fresh = way->own;
    int step = 0;
    for (flags act = open & ~way->near; some(act); act = open & ~way->near) {
        fresh &= act;
        if (some(fresh)) {
            flags lost = refactorise(p, x, way, fresh);
            open &= ~lost;
            act &= ~lost;
            factors += pick(fresh, every(1.0f), none);
            since = pick(fresh, none, since);
            best = pick(fresh, x->relative, best);
        }
        way->count += pick(fresh | (act & ~way->own), every(1.0f), none);
        singles before = x->relative;
        flags lost = take_step(p, x, way, act);
        open &= ~lost;
        act &= ~lost;
        way->moved |= act;
        way->rate = pick(act, x->relative / before, way->rate);
        since += pick(act, every(1.0f), none);
        flags still = act & (x->relative < 1e-4f) & (way->rate > 0.5f); /* at its rounding */
        way->near |= still | (act & (x->relative <= enough));
        act &= ~way->near;
        flags poor = act & way->own & ~(expected(x->relative, way->rate, steps) <= enough);
        flags due = act & (since >= interval), gained = x->relative <= part * best;
        best = pick(due, x->relative, best);
        since = pick(due, none, since);
        fresh = (due & ~gained) | (cheap ? poor : poor & (way->rate > bad));
        if (++step % TOGETHER && !cheap) fresh = (flags){0};
        if (some(fresh & ~way->own)) catch_up(p, x, way, fresh & ~way->own);
        way->own |= fresh;
        open &= ~(fresh & (factors >= FACTORS)) & ~(way->count >= (float)s->limit);
    }
    way->near &= open;
    catch_up(p, x, way, way->near);
}

/* λ where float32 has left it; the start itself where it has not moved */
INLINE void take_over(const Plan *p, const Group *g, const Way *way, Work *x, int half) {
    mask moved = widened_flags(way->moved & way->near, half);
    for (int64_t i = 0; i < p->worked; i++)
        x->multipliers[i] = choose(moved, widened(g->multipliers[i], half), x->multipliers[i]);
}

/* A factor for the lanes of `which`, at the slopes of float64; returns where there is none */
INLINE flags own_factor(const Plan *p, Group *g, Work *const *x, int halves, Way *way, flags which) {
    if (!some(which)) return which;
    for (int64_t k = 0; k < p->given; k++) g->w[k] = narrowed(x[0]->w[k], x[halves - 1]->w[k]);
    way->count += pick(which, every(1.0f), every(0.0f));
    return refactorise(p, g, way, which);
}

/* Everything at the multipliers in float64, and 1/(|b| + share·|A||z|) in `trial`, here for all that
 * follows: it changes no more than z does */
PART void evaluate_first(const Plan *p, const Solve *s, Work *x) {
    lanes terms[TILE];
    TIMED(PRODUCTS, predict(p, x));
    TIMED(ACTIVATION, activate_outputs(p, x));
    sizes_of_outputs(p, x);
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, p->positive ? x->z : x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            lanes scale = absolute(x->b[i + t]) + (i + t < p->kept ? s->share : 1.0) * terms[t];
            scale = at_most(at_least(scale, all(0x1p-1022)), all(0x1.fp997));
            x->trial[i + t] = (i + t < p->kept ? 1.0 : implied(s)) / scale;
        }
    }
}

/* A z − b, and its size */
INLINE void compare_again(const Plan *p, Work *x) {
    lanes sum[TILE], largest = all(0.0);
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->z, i, 1, sum);
        for (int t = 0; t < TILE; t++) {
            x->residual[i + t] = sum[t] - x->b[i + t];
            largest = larger(largest, absolute(x->residual[i + t]) * x->trial[i + t]);
        }
    }
    x->relative = largest;
}

PART void evaluate_again(const Plan *p, Work *x) {
    TIMED(PRODUCTS, predict(p, x));
    TIMED(ACTIVATION, activate_outputs(p, x));
    TIMED(PRODUCTS, compare_again(p, x));
}

/* One step of the lanes of `act` in float32, added to float64: by how much z moves is in t. Returns the
 * largest move of u. */
PART singles add_step(const Plan *p, Group *g, Work *const *x, int halves, Way *way, flags act) {
    singles by, far = every(0.0f);
    TIMED(FACTORISATION, by = direction(p, g, way, act, LONGEST));
    const mask on[2] = {widened_flags(act, 0), widened_flags(act, 1)};
    for (int64_t i = 0; i < p->worked; i++)
        g->gone[i] = pick(act, g->gone[i] + by * g->p[i], g->gone[i]);
    for (int64_t k = 0; k < p->given; k++) {
        singles du = by * g->d[k], curve = curvature(p, k, g->z[k]);
        singles dz = g->w[k] * du * (1.0f + 0.5f * curve * du);
        far = most_of(size_of(du), far);
        g->t[k] = dz;
        g->z[k] = pick(act, g->z[k] + dz, g->z[k]);
        g->w[k] = pick(act, g->w[k] * (1.0f + curve * du), g->w[k]);
        for (int h = 0; h < halves; h++) {
            x[h]->u[k] = choose(on[h], x[h]->u[k] + widened(du, h), x[h]->u[k]);
            x[h]->z[k] = choose(on[h], x[h]->z[k] + widened(dz, h), x[h]->z[k]);
        }
    }
    return far;
}

/* A z − b after z has moved by t, where `on` */
INLINE void add_residual(const Plan *p, Group *g, Work *const *x, int halves, const mask *on) {
    products(p->columns, p->worked, g->t, p->given, g->y);
    lanes largest[2][2] = {{all(0.0), all(0.0)}, {all(0.0), all(0.0)}};
    for (int64_t i = 0; i < p->worked; i++)
        for (int h = 0; h < halves; h++) {
            lanes sum = x[h]->residual[i] + widened(g->y[i], h);
            x[h]->residual[i] = choose(on[h], sum, x[h]->residual[i]);
            lanes part = absolute(x[h]->residual[i]) * x[h]->trial[i];
            largest[h][i % 2] = larger(largest[h][i % 2], part);
        }
    for (int h = 0; h < halves; h++) x[h]->relative = larger(largest[h][0], largest[h][1]);
}

/* What the steps have moved the multipliers by, onto those of float64 */
INLINE void add_gone(const Plan *p, Group *g, Work *const *x, int halves, const Way *way) {
    for (int64_t i = 0; i < p->worked; i++) g->multipliers[i] = every(0.0f);
    catch_up(p, g, way, way->near);
    for (int64_t i = 0; i < p->worked; i++)
        for (int h = 0; h < halves; h++) x[h]->multipliers[i] += widened(g->multipliers[i], h);
}

/* To the rounding of float32: steps in float32 that are added to float64. Where every row takes part. */
PART void end_loosely(const Plan *p, const Solve *s, Group *g, Work *const *x, int halves, Way *way,
                      mask *solved) {
    flags act = way->near;
    const int other = halves - 1;
    mask on[2];
    for (int h = 0; h < halves; h++) {
        take_over(p, g, way, x[h], h);
        evaluate_first(p, s, x[h]);
        TIMED(PRODUCTS, compare_again(p, x[h]));
        on[h] = widened_flags(act, h);
        solved[h] = on[h] & (x[h]->relative <= s->target);
        on[h] &= ~solved[h] & (x[h]->relative < 1e-3);
    }
    act = narrowed_flags(on[0], on[other]);
    if (!some(act)) return;
    for (int64_t k = 0; k < p->given; k++) {
        g->z[k] = narrowed(x[0]->z[k], x[other]->z[k]);
        g->w[k] = narrowed(x[0]->w[k], x[other]->w[k]);
    }
    act &= ~own_factor(p, g, x, halves, way, act & way->own & ~way->factorised);
    way->begin |= way->own;
    for (int step = 0; step < STEPS && some(act); step++) {
        lanes before[2] = {x[0]->relative, x[other]->relative};
        for (int64_t i = 0; i < p->worked; i++)
            g->r[i] = narrowed(x[0]->residual[i], x[other]->residual[i]);
        way->count += pick(act & ~way->own, every(1.0f), every(0.0f));
        act &= add_step(p, g, x, halves, way, act) <= LINEARLY;
        for (int h = 0; h < halves; h++) on[h] = widened_flags(act, h);
        TIMED(PRODUCTS, add_residual(p, g, x, halves, on));
        for (int h = 0; h < halves; h++) {
            solved[h] |= on[h] & (x[h]->relative <= s->target);
            on[h] &= ~solved[h] & (x[h]->relative < 2.0 * before[h]);
        }
        act = narrowed_flags(on[0], on[other]);
    }
    add_gone(p, g, x, halves, way);
}

/* To the rounding of float64: chords with a factor of float32. Returns which are solved. */
PART void end_tightly(const Plan *p, const Solve *s, Group *g, Work *const *x, int halves, Way *way,
                      mask *solved) {
    flags act = way->near;
    lanes best[2], stalls[2], scale[2];
    mask on[2];
    for (int h = 0; h < halves; h++) {
        take_over(p, g, way, x[h], h);
        evaluate_first(p, s, x[h]);
        TIMED(PRODUCTS, compare_again(p, x[h]));
        scale[h] = all(0x1p-1000); /* the residual is divided by it, to keep it within float32 */
        for (int64_t i = 0; i < p->worked; i++) scale[h] = larger(scale[h], absolute(x[h]->residual[i]));
        best[h] = all(INFINITY);
        stalls[h] = all(0.0);
        solved[h] = best[h] < 0.0;
    }
    for (int step = 0;; step++) {
        for (int h = 0; h < halves; h++) {
            mask rest, gained = x[h]->relative < 0.5 * best[h];
            on[h] = widened_flags(act, h);
            stalls[h] = choose(gained, all(0.0), stalls[h] + 1.0);
            best[h] = at_most(best[h], x[h]->relative);
            mask done = on[h] & judge(p, s, x[h], stalls[h], &rest);
            solved[h] |= done;
            mask low = x[h]->relative <= s->rules->near * s->rules->unit;
            on[h] &= ~(done | rest) & (gained | low) & (stalls[h] < 3.0);
        }
        act = narrowed_flags(on[0], on[halves - 1]);
        if (step == STEPS || !some(act)) return;
        const int other = halves - 1;
        if (step == 0) {
            singles left = expected(every(3e-6f), way->rate, patience(p) + 3);
            flags stale = ~way->own | ~way->factorised;
            if (patience(p) < 3) stale |= ~(left <= (float)s->target);
            way->begin |= act;
            for (int64_t k = 0; k < p->given; k++) g->w[k] = narrowed(x[0]->w[k], x[other]->w[k]);
            act &= ~own_factor(p, g, x, halves, way, act & stale);
            way->own |= act;
        }
        for (int64_t i = 0; i < p->worked; i++)
            g->r[i] = narrowed(x[0]->residual[i] / scale[0], x[other]->residual[i] / scale[other]);
        singles by = every(-1.0f);
        const singles *step_of = g->r;
        if (patience(p) < 3) {
            TIMED(FACTORISATION, solve_single(p, g, g->r));
        } else {
            TIMED(FACTORISATION, by = direction(p, g, way, act, INFINITY));
            step_of = g->p;
        }
        for (int h = 0; h < halves; h++) {
            on[h] = widened_flags(act, h);
            for (int64_t i = 0; i < p->worked; i++) {
                lanes moved = x[h]->multipliers[i] + scale[h] * widened(by * step_of[i], h);
                x[h]->multipliers[i] = choose(on[h], moved, x[h]->multipliers[i]);
            }
            if (any(on[h])) evaluate_again(p, x[h]);
        }
    }
}

#endif
