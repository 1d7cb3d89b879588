/* Most of the way in float32, the end in float64: one or two groups at once, by the steps of steps.h. What
 * does not contract is left to newton.h. */
#ifndef TAUT_MIXED_H
#define TAUT_MIXED_H

#include "steps.h"

#define FEW 16          /* with fewer equations a factor costs less than it saves */
#define SPREAD 0.4f     /* K Σw²/(Σw)² − 1 up to which slopes are even */
#define TOGETHER 4      /* steps until samples, if they want it, have another factor: all at once */
#define FACTORS 8.0f    /* of a sample, at most */
#define STEPS 12        /* in float64 */
#define COARSE 1e-9     /* a target above it is that of float32 */
#define LINEARLY 1e-3f  /* what u may move where z follows by two terms of its series */
#define SURE 0.99999f   /* of the target: what float32 makes of a residual is that near */
#define SMALL 1e25f     /* one over the size of a row whose residual float32 still holds */

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

/* How the lanes of a group go on */
typedef struct {
    flags open, fresh;           /* not given up; to have a factor next */
    singles best, since;         /* relative residual, and steps, since the last look at the gain */
    singles factors;
} Course;

/* What follows from the plan and the target, the same for all samples */
typedef struct {
    int few, steps, cheap;
    float interval, part, bad, enough;
} Pace;

INLINE Pace pace_of(const Plan *p, const Solve *s) {
    const int loose = s->target > COARSE, steps = patience(p), cheap = steps < 3;
    return (Pace){
        .few = p->worked < FEW || !loose,
        .steps = steps,
        .cheap = cheap,
        .interval = cheap ? 3.0f : TOGETHER,
        .part = cheap ? 0.2f : 0.12f,
        .bad = loose ? 0.7f : 0.2f, /* a rate at which the next factor is not put off */
        .enough = !loose ? 3e-6f : s->target > 2e-5 ? 0.5f * (float)s->target : 1e-5f,
    };
}

/* Everything at the start of the groups, which are open where `open` */
PART void set_out(const Plan *p, const Pace *pace, Team *t, const flags *open, Course *course) {
    const singles none = every(0.0f);
    const int bits = (1 << t->count) - 1;
    singles still[ABREAST];
    OF_EACH(t, p->lines, p->given, p->worked, multipliers, u, bits);
    EACH(h, bits) {
        Group *x = &t->group[h];
        for (int64_t i = 0; i < p->worked; i++) x->p[i] = x->before[i] = x->gone[i] = none;
        for (int64_t k = 0; k < p->given; k++) {
            x->d[k] = x->last[k] = none;
            x->u[k] += x->v[k];
        }
        still[h] = none;
    }
    go(p, t, still, bits);
    EACH(h, bits) {
        const Group *x = &t->group[h];
        const flags whole = open[h] | ~open[h], alive = open[h] & (x->relative < INFINITY);
        Way *way = &t->way[h];
        *way = (Way){.near = alive & (x->relative <= pace->enough), .begin = whole};
        way->own = pace->few ? whole : ~(unevenness(p, x->w) <= SPREAD);
        way->rate = every(1.0f);
        way->count = way->along = none;
        course[h] = (Course){alive, way->own, x->relative, none, none};
    }
}

/* Factors for the lanes that want one: those that have none are given up. */
INLINE void renew(const Plan *p, Group *x, Way *way, Course *c, flags *act) {
    const singles none = every(0.0f);
    c->fresh &= *act;
    if (some(c->fresh)) {
        flags lost = refactorise(p, x, way, c->fresh);
        c->open &= ~lost;
        *act &= ~lost;
        c->factors += pick(c->fresh, every(1.0f), none);
        c->since = pick(c->fresh, none, c->since);
        c->best = pick(c->fresh, x->relative, c->best);
    }
    way->count += pick(c->fresh | (*act & ~way->own), every(1.0f), none);
}

/* After a step of the lanes of `act`, which had `before`: which are near, and which want a factor */
INLINE void review(const Pace *pace, Group *x, Way *way, Course *c, flags act, singles before, int whole) {
    const singles none = every(0.0f);
    way->moved |= act;
    way->rate = pick(act, x->relative / before, way->rate);
    c->since += pick(act, every(1.0f), none);
    flags still = act & (x->relative < 1e-4f) & (way->rate > 0.5f); /* at its rounding */
    way->near |= still | (act & (x->relative <= pace->enough));
    act &= ~way->near;
    flags poor = act & way->own & ~(expected(x->relative, way->rate, pace->steps) <= pace->enough);
    flags due = act & (c->since >= pace->interval), gained = x->relative <= pace->part * c->best;
    c->best = pick(due, x->relative, c->best);
    c->since = pick(due, none, c->since);
    c->fresh = (due & ~gained) | (pace->cheap ? poor : poor & (way->rate > pace->bad));
    if (!whole) c->fresh = (flags){0};
}

/* In float32, from where the multipliers are */
PART void approach(const Plan *p, const Solve *s, Team *t, const flags *open) {
    const Pace pace = pace_of(p, s);
    const int bits = (1 << t->count) - 1;
    Course course[ABREAST];
    set_out(p, &pace, t, open, course);
    for (int step = 1;; step++) {
        flags act[ABREAST], tried[ABREAST];
        singles before[ABREAST];
        EACH(h, bits) act[h] = course[h].open & ~t->way[h].near;
        const int alive = live(act, t->count);
        if (!alive) break;
        EACH(h, alive) {
            renew(p, &t->group[h], &t->way[h], &course[h], &act[h]);
            before[h] = t->group[h].relative;
            tried[h] = act[h];
        }
        take_steps(p, t, act);
        EACH(h, alive) {
            Group *x = &t->group[h];
            Way *way = &t->way[h];
            Course *c = &course[h];
            c->open &= ~(tried[h] & ~act[h]);
            review(&pace, x, way, c, act[h], before[h], pace.cheap || step % TOGETHER == 0);
            if (some(c->fresh & ~way->own)) catch_up(p, x, way, c->fresh & ~way->own);
            way->own |= c->fresh;
            c->open &= ~(c->fresh & (c->factors >= FACTORS)) & ~(way->count >= (float)s->limit);
        }
    }
    EACH(h, bits) {
        t->way[h].near &= course[h].open;
        catch_up(p, &t->group[h], &t->way[h], t->way[h].near);
    }
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

/* z after u has moved by `by` along d, by two terms of its series: t is what it moves by. Returns the
 * largest move of u. u and v are what u and z have moved by in all. */
INLINE singles drift(const Plan *p, Group *g, singles by, const int64_t kind) {
    singles far = every(0.0f);
    for (int64_t k = 0; k < p->given; k++) {
        const singles du = by * g->d[k];
        const singles curve = kind == SIGMOID ? 1.0f - 2.0f * g->z[k] : curvature(p, k, g->z[k]);
        const singles dz = g->w[k] * du * (1.0f + 0.5f * curve * du);
        far = most_of(size_of(du), far);
        g->t[k] = dz;
        g->z[k] += dz;
        g->w[k] *= 1.0f + curve * du;
        g->u[k] += du;
        g->v[k] += dz;
    }
    return far;
}

PART singles drift_by(const Plan *p, Group *g, singles by) {
    for (int64_t i = 0; i < p->worked; i++) g->gone[i] += by * g->p[i];
    return p->uniform == SIGMOID ? drift(p, g, by, SIGMOID) : drift(p, g, by, -1);
}

/* A z − b after z has moved by t, and its size */
INLINE void add_residual(const Plan *p, Group *g) {
    singles relative = every(0.0f);
    for (int64_t i = 0; i < p->worked; i++) {
        g->r[i] += g->y[i];
        const singles part = size_of(g->r[i]) * g->scale[i];
        relative = pick(part == part, most_of(part, relative), every(INFINITY));
    }
    g->relative = relative;
}

/* A group in float64, for steps in float32: which lanes have steps to go, and which are solved already */
PART flags weigh(const Plan *p, const Solve *s, Group *g, Work *const *x, int halves, const Way *way,
                 mask *solved) {
    mask on[2];
    const int other = halves - 1;
    for (int h = 0; h < halves; h++) {
        take_over(p, g, way, x[h], h);
        evaluate_first(p, s, x[h]);
        TIMED(PRODUCTS, compare_again(p, x[h]));
        on[h] = widened_flags(way->near, h);
        solved[h] = on[h] & (x[h]->relative <= s->target);
        on[h] &= ~solved[h] & (x[h]->relative < 1e-3);
    }
    for (int64_t k = 0; k < p->given; k++) {
        g->z[k] = narrowed(x[0]->z[k], x[other]->z[k]);
        g->w[k] = narrowed(x[0]->w[k], x[other]->w[k]);
        g->u[k] = g->v[k] = every(0.0f);
    }
    for (int64_t i = 0; i < p->worked; i++) {
        g->r[i] = narrowed(x[0]->residual[i], x[other]->residual[i]);
        g->scale[i] = narrowed(x[0]->trial[i], x[other]->trial[i]);
    }
    g->relative = narrowed(x[0]->relative, x[other]->relative);
    flags fine = narrowed_flags(on[0], on[other]);
    for (int64_t i = 0; i < p->worked; i++) fine &= g->scale[i] < SMALL;
    return fine;
}

/* What float32 has moved, onto float64, which is asked again where it is returned */
PART void add_moves(const Plan *p, const Solve *s, Group *g, Work *const *x, int halves, const Way *way,
                    mask *solved) {
    for (int64_t i = 0; i < p->worked; i++) g->multipliers[i] = every(0.0f);
    catch_up(p, g, way, way->near);
    for (int h = 0; h < halves; h++) {
        for (int64_t i = 0; i < p->worked; i++) x[h]->multipliers[i] += widened(g->multipliers[i], h);
        for (int64_t k = 0; k < p->given; k++) {
            x[h]->u[k] += widened(g->u[k], h);
            x[h]->z[k] += widened(g->v[k], h);
        }
        if (s->single) continue;
        compare_again(p, x[h]); /* it is returned as it is */
        solved[h] &= x[h]->relative <= s->target;
    }
}

/* To the rounding of float32: by steps in float32 from where float64 is. Where every row takes part. */
PART void end_loosely(const Plan *p, const Solve *s, Team *t, Work *const (*x)[2], const int *halves,
                      mask (*solved)[2]) {
    const int bits = (1 << t->count) - 1;
    const float target = SURE * (float)s->target;
    flags act[ABREAST], done[ABREAST];
    EACH(h, bits) {
        Way *way = &t->way[h];
        act[h] = weigh(p, s, &t->group[h], x[h], halves[h], way, solved[h]);
        done[h] = act[h] & ~act[h];
        act[h] &= ~own_factor(p, &t->group[h], x[h], halves[h], way, act[h] & way->own & ~way->factorised);
        way->begin |= way->own;
    }
    const int moved = live(act, t->count);
    for (int step = 0; step < STEPS; step++) {
        const int on = live(act, t->count);
        if (!on) break;
        TIMED(FACTORISATION, directions(p, t, act, LONGEST));
        EACH(h, on) {
            Way *way = &t->way[h];
            way->count += pick(act[h] & ~way->own, every(1.0f), every(0.0f));
            act[h] &= drift_by(p, &t->group[h], way->by) <= LINEARLY;
        }
        TIMED(PRODUCTS, OF_EACH(t, p->columns, p->worked, p->given, t, y, on));
        EACH(h, on) {
            Group *g = &t->group[h];
            const singles before = g->relative;
            add_residual(p, g);
            done[h] |= act[h] & (g->relative <= target);
            act[h] &= ~done[h] & (g->relative < 2.0f * before);
        }
    }
    EACH(h, moved) {
        for (int i = 0; i < halves[h]; i++) solved[h][i] |= widened_flags(done[h], i);
        add_moves(p, s, &t->group[h], x[h], halves[h], &t->way[h], solved[h]);
    }
}

/* To the rounding of float64: chords with a factor of float32. Returns which are solved. */
PART void end_tightly(const Plan *p, const Solve *s, Team *t, int at, Work *const *x, int halves,
                      mask *solved) {
    Group *g = &t->group[at];
    Way *way = &t->way[at];
    flags act = way->near, only[ABREAST] = {{0}};
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
            only[at] = act;
            TIMED(FACTORISATION, directions(p, t, only, INFINITY));
            by = way->by;
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
