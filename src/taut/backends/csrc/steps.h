/* Steps of conjugate gradients in float32, for one or two groups at once. A sample's are preconditioned
 * by the factor of its own A diag(w) Aᵀ, or by (A Aᵀ)⁻¹ where its slopes are even. Every decision is a
 * lane's own. */
#ifndef TAUT_STEPS_H
#define TAUT_STEPS_H

#include "newton.h"
#include "single.h"

#define LONGEST 3.0f    /* u moves no further in a step */
#define ANCHORED 100.0f /* but where equations are anchored, and a step is longer than this */
#define CUTS 6          /* of a step that is too long */

/* What the lanes of a group have come to */
typedef struct {
    flags near;             /* in float32 there is nothing more to gain */
    flags moved;            /* by a step */
    flags own, factorised;  /* the preconditioner that a lane uses; is there a factor? */
    flags begin;            /* with the next step a new sequence of directions begins */
    singles rate, count;    /* gain of the last step; iterations */
    singles along, down;    /* of the step before: rᵀy; −rᵀp */
    singles by, from, upto; /* how far it goes; zᵀd where it begins and where it ends */
} Way;

/* What a thread works on at once */
typedef struct {
    Group group[ABREAST];
    Way way[ABREAST];
    int count;
} Team;

/* A bit for each group with a lane in `which` */
INLINE int live(const flags *which, int count) {
    int found = 0;
    for (int h = 0; h < count; h++) found |= some(which[h]) << h;
    return found;
}

#define EACH(h, bits) for (int h = 0; h < ABREAST; h++) if ((bits) >> h & 1)

/* to = mᵀx for a field x and a field `to` of the groups in `live` */
#define OF_EACH(team, m, n, count, x, to, live)                                     \
    products_of(m, n, count, (singles *[]){(team)->group[0].x, (team)->group[1].x}, \
                (singles *[]){(team)->group[0].to, (team)->group[1].to}, live)

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

/* p and d of the next step from the residual r and what (A diag(w) Aᵀ)⁻¹ about makes of it, y. For lanes
 * with a factor of their own that is in y. For the others r itself stands for y, and p for (A Aᵀ)⁻¹p: all
 * they need is t = Aᵀ(A Aᵀ)⁻¹r, as tᵀt′ = rᵀ(A Aᵀ)⁻¹r′. Lanes that are not in `act` keep their place. */
PART void turn(const Plan *p, Group *x, Way *way, flags act, int own, int even) {
    const int64_t n = p->worked, K = p->given;
    const singles none = every(0.0f);
    singles now = none, before = none, down = none;
    for (int64_t k = 0; even && k < K; k++) {
        now += x->t[k] * x->t[k];
        before += x->last[k] * x->t[k];
    }
    if (own) {
        now = pick(way->own, dot_single(n, x->r, x->y), now);
        before = pick(way->own, dot_single(n, x->before, x->y), before);
    }
    singles beta = (now - before) / way->along; /* Polak and Ribière */
    beta = pick(~way->begin & (beta > 0.0f), beta, none);
    for (int64_t i = 0; i < n; i++) {
        const singles r = x->r[i], y = own ? pick(way->own, x->y[i], r) : r;
        const singles moved = pick(act, beta * x->p[i] - y, x->p[i]);
        x->p[i] = moved;
        if (!own) continue;
        down -= r * moved;
        x->before[i] = pick(act, r, x->before[i]);
    }
    singles across = none;
    for (int64_t k = 0; even && k < K; k++) {
        const singles t = x->t[k], d = pick(act, beta * x->d[k] - t, x->d[k]);
        x->d[k] = d;
        x->last[k] = pick(act, t, x->last[k]);
        across -= t * d;
    }
    if (even) down = own ? pick(way->own, down, across) : across;
    const flags up = act & ~(down > 0.0f);
    if (some(up)) {
        for (int64_t i = 0; i < n; i++)
            x->p[i] = pick(up, -(own ? pick(way->own, x->y[i], x->r[i]) : x->r[i]), x->p[i]);
        for (int64_t k = 0; even && k < K; k++) x->d[k] = pick(up, -x->t[k], x->d[k]);
        down = pick(up, now, down);
    }
    way->along = pick(act, now, way->along);
    way->down = down;
    way->begin &= ~act;
}

/* How far to go along d: u moves by `longest` at most. */
INLINE void measure_step(const Plan *p, const Group *x, Way *way, flags act, float longest) {
    singles far = every(0.0f), curve = far, from = far;
    for (int64_t k = 0; k < p->given; k++) {
        const singles d = x->d[k];
        far = most_of(size_of(d), far);
        curve += x->w[k] * d * d;
        from += x->z[k] * d;
    }
    const singles by = way->down / curve, reach = by * far;
    flags whole = reach <= longest;
    if (p->anchored) whole |= reach > ANCHORED;
    way->by = pick(act, pick(whole, by, longest / far), every(0.0f));
    way->from = from;
}

/* The next directions of the lanes of `act`, d = Aᵀp, and how far to go along them */
PART void directions(const Plan *p, Team *t, const flags *act, float longest) {
    int own = 0, even = 0;
    EACH(h, live(act, t->count)) {
        own |= some(act[h] & t->way[h].own) << h;
        even |= some(act[h] & ~t->way[h].own) << h;
    }
    EACH(h, own) {
        Group *x = &t->group[h];
        memcpy(x->y, x->r, p->worked * sizeof *x->y);
        solve_single(p, x, x->y);
    }
    OF_EACH(t, p->straight, p->given, p->worked, r, t, even);
    EACH(h, own | even) turn(p, &t->group[h], &t->way[h], act[h], own >> h & 1, even >> h & 1);
    OF_EACH(t, p->lines, p->given, p->worked, p, t, own);
    EACH(h, own | even) {
        Group *x = &t->group[h];
        const flags which = act[h] & t->way[h].own;
        for (int64_t k = 0; own >> h & 1 && k < p->given; k++) x->d[k] = pick(which, x->t[k], x->d[k]);
        measure_step(p, x, &t->way[h], act[h], longest);
    }
}

/* The multipliers of the lanes of `which` catch up with the steps. */
PART void catch_up(const Plan *p, Group *x, const Way *way, flags which) {
    const int64_t n = p->worked;
    memcpy(x->y, x->gone, n * sizeof *x->y);
    if (some(which & ~way->own)) products(p->inverse_single, n, x->gone, x->gone, n, x->y, x->y, 0);
    for (int64_t i = 0; i < n; i++) {
        singles moved = x->multipliers[i] + pick(way->own, x->gone[i], x->y[i]);
        x->multipliers[i] = pick(which, moved, x->multipliers[i]);
        x->gone[i] = pick(which, every(0.0f), x->gone[i]);
    }
}

/* `by` along p and d, 0 for lanes that stay; everything there, of the groups in `bits` */
PART void go(const Plan *p, Team *t, const singles *by, int bits) {
    singles most[ABREAST];
    EACH(h, bits) {
        Group *x = &t->group[h];
        for (int64_t i = 0; i < p->worked; i++) x->gone[i] += by[h] * x->p[i];
        TIMED(ACTIVATION, most[h] = move_by(p, x, by[h], &t->way[h].upto));
    }
    TIMED(PRODUCTS, OF_EACH(t, p->columns, p->worked, p->given, z, r, bits));
    EACH(h, bits) compare_single(p, &t->group[h], most[h]);
}

/* rᵀp where the step has come to; where p stands for another, from zᵀd */
INLINE singles along(const Plan *p, const Group *x, const Way *way) {
    const singles even = way->upto - way->from - way->down;
    return some(way->own) ? pick(way->own, dot_single(p->worked, x->r, x->p), even) : even;
}

/* Back from a step that is too long, in the lanes of `longer`: what is left of them is where it is no use. */
PART flags shorten(const Plan *p, Team *t, int h, flags longer) {
    Group *x = &t->group[h];
    Way *way = &t->way[h];
    singles by[ABREAST], left = along(p, x, way);
    for (int cut = 0; cut < CUTS && some(longer); cut++) {
        singles part = way->down / (way->down + left);
        part = pick((part > 0.1f) & (part < 0.5f), part, pick(part >= 0.5f, every(0.5f), every(0.1f)));
        by[h] = pick(longer, way->by * part - way->by, every(0.0f));
        go(p, t, by, 1 << h);
        way->by = pick(longer, way->by * part, way->by);
        way->begin |= longer;
        left = along(p, x, way);
        longer &= ~(left <= 0.5f * way->down);
    }
    return longer;
}

/* One step of the lanes of `act`; those where it is no use leave it. */
INLINE void take_steps(const Plan *p, Team *t, flags *act) {
    const int bits = live(act, t->count);
    singles by[ABREAST];
    TIMED(FACTORISATION, directions(p, t, act, LONGEST));
    EACH(h, bits) by[h] = t->way[h].by;
    go(p, t, by, bits);
    EACH(h, bits) {
        const Group *x = &t->group[h];
        const Way *way = &t->way[h];
        flags longer = act[h] & ~(along(p, x, way) <= 0.5f * way->down);
        if (some(longer)) longer = shorten(p, t, h, longer);
        act[h] &= ~longer & (x->relative < INFINITY);
    }
}

#endif
