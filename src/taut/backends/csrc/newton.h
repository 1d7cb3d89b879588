/* Newton's method for a batch with one A, LANES samples at a time: each in a lane of its own, so
 * that what becomes of it depends on no other. Only easy samples are decided here, and only as
 * solved; every other is left to the caller. The rules are those of solvers/. */
#ifndef TAUT_NEWTON_H
#define TAUT_NEWTON_H

#include "factor.h"
#include "state.h"

#define VANISHED 1e-30 /* a slope */
#define UNSOLVED 1e-2  /* of b: such a residual is far from solved */
#define LIFTS 4        /* at most: rows may share outputs */
#define HIGH 1e3       /* of b: from there on the way down is longer than the way up */

INLINE lanes dot(const Plan *p, const lanes *x, const lanes *y) {
    lanes sum = all(0.0);
    for (int64_t i = 0; i < p->kept; i++) sum += x[i] * y[i];
    return sum;
}

/* The multipliers move by `by` times the step, where `which`. */
INLINE void move(const Plan *p, Work *x, lanes by, mask which) {
    by = choose(which, by, all(0.0));
    for (int64_t i = 0; i < p->kept; i++) {
        lanes moved = x->multipliers[i] + by * x->step[i];
        x->multipliers[i] = choose(which, moved, x->multipliers[i]);
    }
}

/* A diag(w) Aᵀ of the rows kept, and 1 on the diagonal for those that a sample leaves out */
INLINE void form_kept(const Plan *p, Work *x, const lanes *w) {
    form_gram(p, w, x->gram);
    for (int64_t i = 0; x->apart && i < p->kept; i++)
        for (int64_t j = 0; j <= i; j++) {
            lanes *entry = &x->gram[triangle(i) + j];
            *entry = choose((x->out[i] + x->out[j]) > 0.0, all(i == j), *entry);
        }
}

/* Newton's step from the residual, with the factor there is, where `which` */
PART void find_step(const Plan *p, Work *x, mask which) {
    for (int64_t i = 0; i < p->kept; i++)
        x->trial[i] = choose(is_kept(p, x, i), -x->residual[i], all(0.0));
    solve_gram(p, x->gram, x->diagonal, x->trial, x->y);
    for (int64_t i = 0; i < p->kept; i++) x->step[i] = choose(which, x->trial[i], x->step[i]);
}

/* max|Aᵀx|; where σ bends it is in `far` */
INLINE lanes span(const Plan *p, const lanes *x, lanes *far) {
    lanes largest = all(0.0), sum[TILE];
    *far = largest;
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        adjoint(p, x, k, sum);
        for (int t = 0; t < TILE; t++) {
            largest = larger(largest, absolute(sum[t]));
            *far = farther_at(p, k + t, *far, sum[t]);
        }
    }
    return largest;
}

/* The step where Newton's is hopeless: _damped of solvers/step.py. The factor is lost. */
PART void damp(const Plan *p, const Rules *r, Work *x, mask *which) {
    for (int64_t i = 0; i < p->kept; i++)
        x->trial[i] = choose(is_kept(p, x, i), -x->residual[i], all(0.0));
    multiply(p, p->flat, x->trial, x->y);
    lanes far, mu = span(p, x->trial, &far) / r->damped;
    for (int64_t k = 0; k < p->outputs; k++) x->y[k] = x->w[k] + mu;
    form_kept(p, x, x->y);
    factorise(p, x->gram, x->diagonal, r->pivot, which);
    find_step(p, x, *which);
}

/* From whole steps that were not good, of reach `far`: back, and shorter or longer ones. Where the
 * equations are anchored the curvature is never small: none runs away, and the longest are tried in
 * full. What is left in `which` is where none was found. */
PART void search(const Plan *p, const Solve *s, Work *x, lanes first, lanes far, mask *which) {
    const Rules *r = s->rules;
    mask todo = *which, wild = todo & ~(far <= r->wild * r->reach);
    if (p->anchored) far = choose(wild & (far < INFINITY), all(0.0), far);
    wild &= far != 0.0;
    move(p, x, all(-1.0), todo);
    if (any(wild)) {
        evaluate(p, s, x);
        damp(p, r, x, &wild);
        first = choose(wild, absolute(dot(p, x->step, x->residual)), first);
        lanes damped;
        span(p, x->step, &damped);
        far = choose(wild, damped, far);
    }
    lanes low = all(0.0), alpha = at_most(r->reach / far, all(1.0)), now = low;
    mask growing = todo;
    for (int trial = 0; trial < r->trials && any(todo); trial++) {
        move(p, x, alpha - now, todo);
        now = choose(todo, alpha, now);
        evaluate(p, s, x);
        lanes h = dot(p, x->step, x->residual);
        mask too_long = todo & ~(h <= r->overshoot * first);
        mask too_short = todo & growing & (h < -r->undershoot * first);
        lanes cut = at_most(at_least(first / (first + h), all(r->cut)), all(0.5));
        cut = choose(cut == cut, cut, all(r->cut));
        growing = too_short & (alpha < r->longest);
        lanes cut_to = low + (alpha - low) * cut;
        low = choose(too_short, alpha, low);
        alpha = choose(too_long, cut_to, choose(too_short, r->growth * alpha, alpha));
        todo = too_long | too_short;
    }
    *which = todo;
}

/* Does a start lead nowhere? Where no σ bends, one step leads anywhere. */
INLINE mask is_lost(const Plan *p, const Solve *s, const Work *x) {
    mask lost = ~(x->relative < INFINITY);
    for (int64_t i = 0; p->bending && i < p->rows; i++)
        lost |= ~(absolute(x->residual[i]) <= s->rules->lost * (1.0 + absolute(x->b[i])));
    return lost;
}

/* A better start where exp begins far too high, if there is one: _lower of solvers/starts.py */
PART void lower(const Plan *p, const Solve *s, Work *x, mask lost) {
    lanes shift = all(0.0), best = all(INFINITY);
    memcpy(x->step, x->multipliers, p->kept * sizeof *x->step);
    for (int attempt = -1; attempt < 3; attempt++) { /* first as it is */
        for (int64_t i = 0; i < p->kept && attempt >= 0; i++) x->trial[i] = all(0.0);
        if (attempt > 0) {
            for (int64_t k = 0; k < p->outputs; k++)
                x->z[k] = choose(is_infinite(x->v[k]), all(0.0), -(x->v[k] + shift));
            for (int64_t i = 0; i < p->kept; i += TILE) apply(p, x->z, i, 1, x->trial + i);
            multiply(p, p->flat, x->trial, x->y);
        }
        for (int64_t i = 0; i < p->kept && attempt >= 0; i++)
            x->multipliers[i] = choose(lost, x->trial[i], x->multipliers[i]);
        evaluate(p, s, x);
        lanes size = all(0.0);
        for (int64_t i = 0; i < p->rows; i++) size = larger(size, absolute(x->residual[i]));
        mask better = size < best; /* not where it is NaN */
        best = choose(better, size, best);
        for (int64_t i = 0; i < p->kept; i++)
            x->step[i] = choose(better, x->multipliers[i], x->step[i]);
        if (attempt < 1) continue;
        shift = all(-INFINITY);
        for (int64_t k = 0; k < p->given; k++)
            shift = choose(is_infinite(x->v[k]), shift, larger(shift, x->u[k]));
    }
    memcpy(x->multipliers, x->step, p->kept * sizeof *x->step);
    evaluate(p, s, x);
}

/* Σ a of a row */
INLINE double total(const Plan *p, int64_t i) {
    double sum = 0.0;
    for (int64_t k = 0; k < p->given; k++) sum += p->a[i * p->outputs + k];
    return sum;
}

/* Are all its entries the same? */
INLINE int is_sum(const Plan *p, int64_t i) {
    int64_t count = 0;
    for (int64_t k = 0; k < p->given; k++) count += p->a[i * p->outputs + k] != 0.0;
    return fabs(total(p, i)) >= (1.0 - 1e-12) * count * p->largest[i];
}

/* A residual over Σ|a| + |b| */
INLINE lanes off(const Plan *p, const Work *x, int64_t i) {
    return absolute(x->residual[i]) / at_least(p->sizes[i] + absolute(x->b[i]), all(0x1p-1022));
}

/* Sums of outputs that have all vanished, as those of exp do at −1e9, begin with u near 0:
 * _lift of solvers/starts.py. */
PART void lift(const Plan *p, const Solve *s, Work *x, mask which) {
    lanes terms[TILE], least = x->w[0];
    for (int64_t k = 1; k < p->given; k++) least = at_most(least, x->w[k]);
    which &= (least <= VANISHED) & ~x->held;
    if (!any(which)) return;
    for (int time = 0; time < LIFTS; time++) {
        mask sunk = which & ~which;
        lanes before = all(1.0), after = all(0.0);
        for (int64_t i = 0; i < p->kept; i++) {
            if (i % TILE == 0) apply(p, x->w, i, 0, terms);
            before = larger(before, off(p, x, i));
            mask deep = which & (terms[i % TILE] <= VANISHED * p->sizes[i]);
            deep &= absolute(x->residual[i]) > UNSOLVED * absolute(x->b[i]);
            if (p->least[i] > -INFINITY && p->most[i] < INFINITY) deep &= ~deep;
            if (!is_sum(p, i)) deep &= ~deep;
            x->step[i] = within(deep, all(1.0));
            x->diagonal[i] = x->multipliers[i];
            sunk |= deep;
        }
        if (!any(sunk)) return;
        for (int to_top = 0; to_top < 2; to_top++) {
            for (int64_t i = 0; i < p->kept; i++) {
                const double *a = p->a + i * p->outputs;
                lanes top = all(-INFINITY), sum = all(0.0);
                for (int64_t k = 0; k < p->given; k++) {
                    if (a[k] == 0.0) continue;
                    sum += a[k] * x->u[k];
                    top = larger(top, x->u[k]);
                }
                x->trial[i] = within(x->step[i] > 0.0, to_top ? -top * total(p, i) : -sum);
            }
            multiply(p, p->flat, x->trial, x->y);
            for (int64_t i = 0; i < p->kept; i++) x->multipliers[i] += within(sunk, x->trial[i]);
            predict(p, x);
        }
        evaluate(p, s, x);
        mask high = sunk & ~sunk;
        for (int64_t i = 0; i < p->kept; i++) {
            after = larger(after, off(p, x, i));
            high |= (x->step[i] > 0.0) & (absolute(x->residual[i]) > HIGH * absolute(x->b[i]));
        }
        mask worse = sunk & (high | ~(after <= before));
        if (!any(worse)) continue;
        for (int64_t i = 0; i < p->kept; i++)
            x->multipliers[i] = choose(worse, x->diagonal[i], x->multipliers[i]);
        evaluate(p, s, x);
        which &= ~worse;
    }
}

/* More steps with the same factor, while each gains a digit */
INLINE void repeat(const Plan *p, const Solve *s, Work *x, mask which) {
    for (int time = 0; time < s->rules->chords; time++) {
        which &= x->relative > s->target;
        if (!any(which)) return;
        lanes before = x->relative;
        TIMED(FACTORISATION, find_step(p, x, which));
        move(p, x, all(1.0), which);
        evaluate(p, s, x);
        mask worse = which & ~(x->relative < before);
        which &= x->relative < s->rules->gain * before;
        if (any(worse)) {
            move(p, x, all(-1.0), worse);
            evaluate(p, s, x);
        }
    }
}

/* Which samples are solved: to the target, or to the rounding of what the residual is made of. The
 * latter must meet the rule as well; those that do not, go to `rest`. */
INLINE mask judge(const Plan *p, const Solve *s, Work *x, lanes stalls, mask *rest) {
    const Rules *r = s->rules;
    const double own = r->unit;
    mask solved = x->relative <= s->target, still = stalls > 0.0;
    mask near = ~solved & ((x->relative <= r->near * own) | still);
    *rest = solved & ~solved;
    if (!any(near)) return solved;
    lanes size;
    level(p, x, &size);
    mask stuck = ((size <= 2 * own) & still) | ((size <= 4 * own) & (stalls > 2.0));
    mask stopped = near & ((size <= own) | stuck);
    if (!any(stopped)) return solved;
    sizes_of_outputs(p, x);
    mask met = measure(p, x, 1.0, 1.0, 0, size) <= s->cap;
    *rest = stopped & ~met;
    return solved | (stopped & met);
}

/* z −= W Aᵀ H⁻¹(A z − b), and u and λ with it, where the rounding of v + Aᵀλ exceeds the rule:
 * `settle` of solvers/verdict.py. What is left in `which` meets it. */
PART void settle(const Plan *p, const Solve *s, Work *x, mask *which) {
    mask fine = *which;
    if (!p->inverse) {
        form_kept(p, x, x->w);
        factorise(p, x->gram, x->diagonal, s->rules->pivot, &fine);
    }
    for (int time = 0; time < 2; time++) {
        lanes sum[TILE];
        find_step(p, x, fine);
        move(p, x, all(1.0), fine);
        for (int64_t k = 0; k < p->outputs; k += TILE) {
            adjoint(p, x->step, k, sum);
            for (int t = 0; t < TILE; t++) {
                lanes by = x->w[k + t] * sum[t], u = x->u[k + t] + sum[t];
                lanes spread = rounded(x, k + t);
                fine &= absolute(by) <= 8.0 * s->rules->unit * (absolute(x->z[k + t]) + spread);
                lanes z = at_least(x->z[k + t] + by, all(p->lower[k + t]));
                x->z[k + t] = choose(fine, at_most(z, all(p->upper[k + t])), x->z[k + t]);
                x->u[k + t] = choose(fine, u, x->u[k + t]);
            }
        }
        for (int64_t i = 0; i < p->rows; i += TILE) {
            apply(p, x->z, i, 1, sum);
            for (int t = 0; t < TILE; t++) x->residual[i + t] = sum[t] - x->b[i + t];
        }
    }
    for (int64_t k = 0; k < p->outputs; k++) { /* where σ is flat, u may have moved far */
        lanes off = absolute(activate_output(p, k, x->u[k]).z - x->z[k]);
        lanes spread = rounded(x, k);
        fine &= off <= 16.0 * s->rules->unit * (absolute(x->z[k]) + spread);
    }
    sizes_of_outputs(p, x);
    *which = fine & (measure(p, x, 1.0, 1.0, 0, x->relative) <= s->cap);
}

/* Where a row is at, or beyond, an end of what it can come to: see held.py */
INLINE mask at_end(const Plan *p, const Solve *s, const Work *x) {
    mask found = all(0.0) != all(0.0);
    for (int64_t i = 0; i < p->rows; i++) {
        found |= x->b[i] <= p->least[i] + s->slack * p->least_terms[i];
        found |= x->b[i] >= p->most[i] - s->slack * p->most_terms[i];
    }
    if (!any(x->held)) return found;
    return pick_mask(x->held, meets_end(p, x->low, x->high, x->b, x->b, s->slack), found);
}

/* Which samples have outputs that v holds at an end, and where their outputs may be */
PART void find_held(const Plan *p, Work *x) {
    x->held = all(0.0) != all(0.0);
    for (int64_t k = 0; k < p->given; k++) x->held |= is_infinite(x->v[k]);
    for (int64_t k = 0; any(x->held) && k < p->given; k++) {
        const double low = lowest_end(p, k), high = highest_end(p, k);
        x->low[k] = choose(x->v[k] == INFINITY, all(high), all(low));
        x->high[k] = choose(x->v[k] == -INFINITY, all(low), all(high));
    }
}

/* The samples and their start, into lanes */
PART void read_block(const Plan *p, const Solve *s, Work *x, int64_t first) {
    read_outputs(p, x->v, s->v, first, s->samples, s->single);
    memcpy(x->u, x->v, p->outputs * sizeof *x->v);
    find_held(p, x);
    read_rows(p, x->b, s->b, s->b_stride, first, s->samples, s->single);
    x->apart = s->left_out != NULL;
    for (int64_t i = 0; x->apart && i < p->rows; i++)
        for (int l = 0; l < LANES; l++) {
            const int64_t at = sample(first, l, s->samples) * p->constraints + p->order[i];
            x->out[i][l] = p->order[i] >= 0 && s->left_out[at];
        }
    if (!s->start) {
        memset(x->multipliers, 0, p->rows * sizeof *x->multipliers);
        return;
    }
    int64_t at[LANES];
    for (int l = 0; l < LANES; l++) {
        int64_t n = sample(first, l, s->samples);
        at[l] = (s->index ? s->index[n] : n) * p->constraints;
    }
    read_rows_at(p, x->multipliers, s->start, at, s->single);
}

/* Everything at the solution, in lanes, of the samples in `which`; returns which of them are solved */
PART mask solve_lanes(const Plan *p, const Solve *s, Work *x, mask which, lanes *taken) {
    const Rules *r = s->rules;
    evaluate(p, s, x);
    lanes start = x->reach;
    mask lost = which & is_lost(p, s, x);
    if (any(lost)) lower(p, s, x, lost);
    lift(p, s, x, which);
    lanes best = all(INFINITY), stalls = all(0.0), iterations = all(0.0);
    mask solved = stalls > 0.0, open = which & (x->relative < INFINITY), left = solved;
    if (!p->anchored) open &= start < r->far;
    open &= ~at_end(p, s, x);
    for (int64_t iteration = 0; any(open); iteration++) {
        mask gained = x->relative < 0.5 * best;
        stalls = choose(gained, all(0.0), stalls + 1.0);
        best = at_most(best, x->relative);
        mask rest, done = open & judge(p, s, x, stalls, &rest);
        solved |= done;
        left |= open & rest;
        open &= ~(done | rest);
        iterations = choose(open, all(iteration + 1), iterations);
        if (iteration == s->limit || !any(open)) break;
        if (!p->inverse) {
            TIMED(HESSIAN, form_kept(p, x, x->w));
            TIMED(FACTORISATION, factorise(p, x->gram, x->diagonal, r->pivot, &open));
        }
        TIMED(FACTORISATION, find_step(p, x, open));
        lanes from = absolute(dot(p, x->step, x->residual)), before = x->relative;
        move(p, x, all(1.0), open);
        evaluate(p, s, x);
        lanes far = x->reach;
        mask good = (absolute(dot(p, x->step, x->residual)) <= r->level * from) & (far <= r->reach);
        if (p->inverse) { /* σ is a line: there is no better step, and no factor to search with */
            good = x->relative < INFINITY;
            open &= good;
        }
        mask bad = open & ~good;
        lanes gain = 2.0 * x->relative / before;
        lanes expected = x->relative;
        for (int time = 0; time < r->chords; time++) expected *= gain;
        repeat(p, s, x, open & good & (expected <= s->target));
        if (any(bad)) {
            TIMED_AS_ONE(LINE_SEARCH, search(p, s, x, from, far, &bad));
            open &= ~bad;
        }
        open &= x->relative < INFINITY;
    }
    if (any(left)) {
        settle(p, s, x, &left);
        solved |= left;
    }
    *taken = iterations;
    return solved & fits(p, s, x);
}

/* What became of the samples in `which`, as the caller of a solve wants it */
PART void write_solution(const Plan *p, Solve *s, Work *x, int64_t first, mask which, mask solved,
                         lanes iterations) {
    lanes residual = all(0.0), sum[TILE];
    if (s->single) /* of z as it will be returned */
        for (int64_t k = 0; k < p->outputs; k++)
            for (int l = 0; l < LANES; l++) x->y[k][l] = (float)x->z[k][l];
    for (int64_t i = 0; i < p->rows; i += TILE) {
        if (s->single) apply(p, x->y, i, 1, sum);
        for (int t = 0; t < TILE; t++)
            residual = larger(residual, absolute(s->single ? sum[t] - x->b[i + t] : x->residual[i + t]));
    }
    write_rows_of(p, x->multipliers, s->multipliers, first, s->samples, s->single, which);
    write_outputs_of(p, x->u, s->u, first, s->samples, s->single, which);
    write_outputs_of(p, x->z, s->z, first, s->samples, s->single, which);
    if (any(which & solved & x->held)) __atomic_store_n(&s->held, 1, __ATOMIC_RELAXED);
    for (int l = 0; l < LANES && first + l < s->samples; l++) {
        if (!which[l]) continue;
        s->iterations[first + l] = (int64_t)iterations[l];
        put(s->residual, first + l, s->single, residual[l]);
        s->status[first + l] = solved[l] ? 0 : -1;
    }
}

#endif
