/* Newton's method for a batch with one A, eight samples at a time: each in a lane of its own, so
 * that what becomes of it depends on no other. Only easy samples are decided here, and only as
 * solved; every other is left to the caller. The rules are those of step.py and newton.py. */
#ifndef TAUT_NEWTON_H
#define TAUT_NEWTON_H

#include <stdlib.h>

#include "calls.h"
#include "factor.h"

/* benchmarks/where_time_goes.py compiles this with a clock in it, for one thread. */
enum { ACTIVATION, PRODUCTS, HESSIAN, FACTORISATION, LINE_SEARCH, ALL, PARTS };
#ifdef TAUT_PROFILE
extern uint64_t taut_ticks[PARTS];
#define TIMED(part, call)                              \
    do {                                               \
        uint64_t start = __builtin_ia32_rdtsc();       \
        call;                                          \
        taut_ticks[part] += __builtin_ia32_rdtsc() - start; \
    } while (0)
#define TIMED_AS_ONE(part, call)                       \
    do {                                               \
        uint64_t before[PARTS];                        \
        memcpy(before, taut_ticks, sizeof before);     \
        uint64_t start = __builtin_ia32_rdtsc();       \
        call;                                          \
        memcpy(taut_ticks, before, sizeof before);     \
        taut_ticks[part] += __builtin_ia32_rdtsc() - start; \
    } while (0)
#else
#define TIMED(part, call) call
#define TIMED_AS_ONE(part, call) call
#endif

#define REACH 5.0
#define TRIALS 20
#define CHORDS 5
#define EPS 0x1p-52
#define FAR 1e-3

typedef struct {
    lanes *v, *u, *z, *w;                                /* outputs */
    lanes *b, *size, *residual, *multipliers, *step, *trial; /* rows */
    lanes *y;                                                /* the longer of the two */
    lanes *gram, *diagonal;                              /* lower triangle by rows; 1/its diagonal */
    lanes relative, reach;
} Work;

/* The residual over |b| + share·|A||z|; `roughly` with what |A||z| can be at most instead. */
INLINE lanes measure(const Plan *p, const Solve *s, Work *x, int roughly, lanes most) {
    lanes largest = all(0.0), terms[TILE];
    for (int64_t i = 0; i < p->rows; i += TILE) {
        if (!roughly) apply(p, p->positive ? x->z : x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            lanes size = roughly ? p->sizes[i + t] * most : terms[t];
            lanes scale = x->size[i + t] + s->share * size;
            scale = at_most(at_least(scale, all(0x1p-1022)), all(0x1.fp997));
            largest = larger(largest, absolute(x->residual[i + t]) / scale);
        }
    }
    return largest;
}

/* u, and how far it has moved */
INLINE lanes predict(const Plan *p, Work *x) {
    lanes reach = all(0.0), sum[TILE];
    mask moved = all(0.0) != all(0.0);
    for (int64_t i = 0; i < p->kept; i++) moved |= x->multipliers[i] != 0.0;
    const int from_zero = !any(moved);
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        if (!from_zero) adjoint(p, x->multipliers, k, sum);
        for (int t = 0; t < TILE; t++) {
            lanes u = from_zero ? x->v[k + t] : x->v[k + t] + sum[t];
            reach = larger(reach, absolute(u - x->u[k + t]));
            x->u[k + t] = u;
        }
    }
    return reach;
}

/* z and w; returns the largest |z| */
INLINE lanes activate_outputs(const Plan *p, Work *x) {
    lanes most = all(0.0);
    for (int64_t k = 0; k < p->outputs; k++) {
        Output out = activate_output(p, k, x->u[k]);
        x->z[k] = out.z;
        x->w[k] = out.slope;
        most = larger(most, absolute(out.z));
    }
    return most;
}

/* The residual and its size */
INLINE void compare(const Plan *p, const Solve *s, Work *x, lanes most) {
    lanes sum[TILE];
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->z, i, 1, sum);
        for (int t = 0; t < TILE; t++) x->residual[i + t] = sum[t] - x->b[i + t];
    }
    x->relative = measure(p, s, x, 1, most);
    /* In truth it is no less. Where that is clearly too much, it need not be known better. */
    mask far = x->relative > (s->target > FAR ? s->target : FAR);
    if (!any(~far)) return;
    for (int64_t k = 0; k < p->outputs && !p->positive; k++) x->y[k] = absolute(x->z[k]);
    x->relative = choose(far, x->relative, measure(p, s, x, 0, most));
}

/* Everything at the multipliers */
PART void evaluate(const Plan *p, const Solve *s, Work *x) {
    lanes most;
    TIMED(PRODUCTS, x->reach = predict(p, x));
    TIMED(ACTIVATION, most = activate_outputs(p, x));
    TIMED(PRODUCTS, compare(p, s, x, most));
}

/* The residual against the size of what is rounded in it: rounding_scale of solver.py. */
PART void level(const Plan *p, Work *x, lanes *to) {
    lanes largest = all(0.0), terms[TILE];
    for (int64_t k = 0; k < p->outputs; k++)
        x->y[k] = absolute(x->z[k]) + x->w[k] * (absolute(x->u[k]) + absolute(x->v[k]));
    for (int64_t i = 0; i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) {
            lanes scale = at_least(absolute(x->b[i + t]) + terms[t], all(0x1p-1022));
            largest = larger(largest, absolute(x->residual[i + t]) / scale);
        }
    }
    *to = largest;
}

/* |b|; for an entry that is 0, what the others let one expect of its row: _size_of_b of newton.py */
PART void size_of_b(const Plan *p, Work *x) {
    lanes natural = all(0.0), largest = all(1e-30);
    int zeros = 0, nothing = 0;
    for (int64_t i = 0; i < p->rows; i++) {
        x->size[i] = absolute(x->b[i]);
        if (p->order[i] < 0) continue;
        if (p->sizes[i] > 0) natural = larger(natural, x->size[i] / p->sizes[i]);
        for (int l = 0; l < LANES; l++) zeros |= x->size[i][l] == 0;
    }
    if (!zeros) return;
    for (int l = 0; l < LANES; l++) nothing |= natural[l] == 0;
    for (int64_t k = 0; nothing && k < p->outputs; k++)
        largest = larger(largest, absolute(activate_output(p, k, x->v[k]).z));
    natural = choose(natural == 0.0, at_most(largest, all(1.0)), natural);
    for (int64_t i = 0; i < p->rows; i++)
        x->size[i] =
            choose(x->size[i] == 0.0, at_most(p->sizes[i] * natural, all(1.0)), x->size[i]);
}

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

/* Newton's step from the residual, with the factor there is, where `which` */
PART void find_step(const Plan *p, Work *x, mask which) {
    for (int64_t i = 0; i < p->kept; i++) x->trial[i] = -x->residual[i];
    solve_gram(p, x->gram, x->diagonal, x->trial, x->y);
    for (int64_t i = 0; i < p->kept; i++) x->step[i] = choose(which, x->trial[i], x->step[i]);
}

/* max|Aᵀx| over the outputs */
INLINE lanes span(const Plan *p, const lanes *x) {
    lanes largest = all(0.0), sum[TILE];
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        adjoint(p, x, k, sum);
        for (int t = 0; t < TILE; t++) largest = larger(largest, absolute(sum[t]));
    }
    return largest;
}

/* The step where Newton's is hopeless: _damped of step.py. The factor is lost. */
PART void damp(const Plan *p, Work *x, mask *which) {
    for (int64_t i = 0; i < p->kept; i++) x->trial[i] = -x->residual[i];
    multiply(p, p->flat, x->trial, x->y);
    lanes mu = span(p, x->trial) / 200.0;
    for (int64_t k = 0; k < p->outputs; k++) x->y[k] = x->w[k] + mu;
    form_gram(p, x->y, x->gram);
    factorise(p, x->gram, x->diagonal, which);
    find_step(p, x, *which);
}

/* From whole steps that were not good, of reach `far`: back, and shorter or longer ones. What is
 * left in `which` is where none was found. */
PART void search(const Plan *p, const Solve *s, Work *x, lanes first, lanes far, mask *which) {
    mask todo = *which, wild = todo & ~(far <= 20 * REACH);
    move(p, x, all(-1.0), todo);
    if (any(wild)) {
        evaluate(p, s, x);
        damp(p, x, &wild);
        first = choose(wild, absolute(dot(p, x->step, x->residual)), first);
        far = choose(wild, span(p, x->step), far);
    }
    lanes low = all(0.0), alpha = at_most(REACH / far, all(1.0)), now = low;
    mask growing = todo;
    for (int trial = 0; trial < TRIALS && any(todo); trial++) {
        move(p, x, alpha - now, todo);
        now = choose(todo, alpha, now);
        evaluate(p, s, x);
        lanes h = dot(p, x->step, x->residual);
        mask too_long = todo & ~(h <= 0.5 * first), too_short = todo & growing & (h < -0.3 * first);
        lanes cut = at_most(at_least(first / (first + h), all(0.1)), all(0.5));
        cut = choose(cut == cut, cut, all(0.1));
        growing = too_short & (alpha < 16.0);
        lanes cut_to = low + (alpha - low) * cut;
        low = choose(too_short, alpha, low);
        alpha = choose(too_long, cut_to, choose(too_short, 4.0 * alpha, alpha));
        todo = too_long | too_short;
    }
    *which = todo;
}

/* A better start where exp begins far too high, if there is one: _lower of newton.py */
PART void lower(const Plan *p, const Solve *s, Work *x, mask lost) {
    lanes shift = all(0.0), best = all(INFINITY);
    memcpy(x->step, x->multipliers, p->kept * sizeof *x->step);
    for (int attempt = -1; attempt < 3; attempt++) { /* first as it is */
        for (int64_t i = 0; i < p->kept && attempt >= 0; i++) x->trial[i] = all(0.0);
        if (attempt > 0) {
            for (int64_t k = 0; k < p->outputs; k++) x->z[k] = -(x->v[k] + shift);
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
        shift = x->u[0];
        for (int64_t k = 1; k < p->given; k++) shift = larger(shift, x->u[k]);
    }
    memcpy(x->multipliers, x->step, p->kept * sizeof *x->step);
    evaluate(p, s, x);
}

/* More steps with the same factor, while each gains a digit */
INLINE void repeat(const Plan *p, const Solve *s, Work *x, mask which) {
    for (int time = 0; time < CHORDS; time++) {
        which &= x->relative > s->target;
        if (!any(which)) return;
        lanes before = x->relative;
        TIMED(FACTORISATION, find_step(p, x, which));
        move(p, x, all(1.0), which);
        evaluate(p, s, x);
        mask worse = which & ~(x->relative < before);
        which &= x->relative < 0.1 * before;
        if (any(worse)) {
            move(p, x, all(-1.0), worse);
            evaluate(p, s, x);
        }
    }
}

/* Which samples are solved: to the target, or to the rounding of what the residual is made of */
INLINE mask judge(const Plan *p, const Solve *s, Work *x, lanes stalls) {
    const double own = 8 * EPS;
    mask solved = x->relative <= s->target, still = stalls > 0.0;
    mask near = x->relative <= choose(still, all(1e-7), all(1e3 * own));
    if (!any(near & ~solved)) return solved;
    lanes size;
    level(p, x, &size);
    mask stuck = ((size <= 2 * own) & still) | ((size <= 4 * own) & (stalls > 2.0));
    return solved | (near & ((size <= own) | stuck));
}

/* Does all that is to be returned fit the dtype? Then also |A||z|, whose size is asked for. */
INLINE mask fits(const Plan *p, const Solve *s, Work *x) {
    lanes largest = all(0.0), terms[TILE];
    for (int64_t i = 0; i < p->kept; i++) largest = larger(largest, absolute(x->multipliers[i]));
    for (int64_t k = 0; k < p->outputs; k++) {
        x->y[k] = absolute(x->z[k]);
        largest = larger(largest, larger(x->y[k], absolute(x->u[k])));
    }
    mask fine = largest <= s->huge;
    for (int64_t i = 0; any(~(largest < 1e6)) && i < p->rows; i += TILE) {
        apply(p, x->y, i, 0, terms);
        for (int t = 0; t < TILE; t++) fine &= terms[t] <= s->huge;
    }
    return fine;
}

PART void solve_block(const Plan *p, Solve *s, Work *x, int64_t first) {
    read_outputs(p, x->v, s->v, first, s->samples, s->single);
    memcpy(x->u, x->v, p->outputs * sizeof *x->v);
    read_rows(p, x->b, s->b, s->b_stride, first, s->samples, s->single);
    if (s->start)
        read_rows(p, x->multipliers, s->start, p->constraints, first, s->samples, s->single);
    else
        memset(x->multipliers, 0, p->rows * sizeof *x->multipliers);
    size_of_b(p, x);
    evaluate(p, s, x);
    mask lost = x->relative != x->relative;
    for (int64_t i = 0; i < p->rows; i++)
        lost |= ~(absolute(x->residual[i]) <= 1e4 * (1.0 + x->size[i]));
    lanes start = x->reach;
    if (any(lost)) lower(p, s, x, lost);
    lanes best = all(INFINITY), stalls = all(0.0), iterations = all(0.0);
    mask solved = stalls > 0.0, open = (x->relative < INFINITY) & (start < 1e3);
    for (int64_t iteration = 0; any(open); iteration++) {
        mask gained = x->relative < 0.5 * best;
        stalls = choose(gained, all(0.0), stalls + 1.0);
        best = at_most(best, x->relative);
        mask done = open & judge(p, s, x, stalls);
        solved |= done;
        open &= ~done;
        iterations = choose(open, all(iteration + 1), iterations);
        if (iteration == s->limit || !any(open)) break;
        if (!p->inverse) {
            TIMED(HESSIAN, form_gram(p, x->w, x->gram));
            TIMED(FACTORISATION, factorise(p, x->gram, x->diagonal, &open));
        }
        TIMED(FACTORISATION, find_step(p, x, open));
        lanes from = absolute(dot(p, x->step, x->residual)), before = x->relative;
        move(p, x, all(1.0), open);
        evaluate(p, s, x);
        lanes far = x->reach;
        mask good = (absolute(dot(p, x->step, x->residual)) <= 0.4 * from) & (far <= REACH);
        if (p->inverse) good = x->relative < INFINITY; /* σ is a line */
        mask bad = open & ~good;
        lanes gain = 2.0 * x->relative / before;
        lanes left = x->relative * gain * gain * gain * gain * gain;
        repeat(p, s, x, open & good & (left <= s->target));
        if (any(bad)) {
            TIMED_AS_ONE(LINE_SEARCH, search(p, s, x, from, far, &bad));
            open &= ~bad;
        }
        open &= x->relative < INFINITY;
    }
    mask fit = fits(p, s, x);
    lanes residual = all(0.0), sum[TILE];
    if (s->single) /* of z as it will be returned */
        for (int64_t k = 0; k < p->outputs; k++)
            for (int l = 0; l < LANES; l++) x->y[k][l] = (float)x->z[k][l];
    for (int64_t i = 0; i < p->rows; i += TILE) {
        if (s->single) apply(p, x->y, i, 1, sum);
        for (int t = 0; t < TILE; t++)
            residual = larger(residual, absolute(s->single ? sum[t] - x->b[i + t] : x->residual[i + t]));
    }
    write_rows(p, x->multipliers, s->multipliers, first, s->samples, s->single);
    write_outputs(p, x->u, s->u, first, s->samples, s->single);
    write_outputs(p, x->z, s->z, first, s->samples, s->single);
    for (int l = 0; l < LANES && first + l < s->samples; l++) {
        s->iterations[first + l] = (int64_t)iterations[l];
        put(s->residual, first + l, s->single, residual[l]);
        s->solved[first + l] = fit[l] && solved[l];
        if (!s->solved[first + l]) __atomic_fetch_add(&s->unsolved, 1, __ATOMIC_RELAXED);
    }
}

/* s = (A diag(w) Aᵀ)⁻¹(A g + g_λ), ∂v = g − w∘Aᵀs, with g = g_u + w∘g_z: see implicit.py */
PART void backward_block(const Plan *p, Backward *s, Work *x, int64_t first) {
    mask live = all(0.0) == all(0.0);
    for (int l = 0; l < LANES; l++) live[l] = -(s->status[sample(first, l, s->samples)] == 0);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    for (int64_t k = 0; k < p->outputs; k++) {
        x->u[k] = choose(live, x->u[k], all(0.0));
        x->w[k] = activate_output(p, k, x->u[k]).slope;
        x->v[k] = all(0.0);
    }
    if (s->g_u) read_outputs(p, x->v, s->g_u, first, s->samples, s->single);
    if (s->g_z) {
        read_outputs(p, x->z, s->g_z, first, s->samples, s->single);
        for (int64_t k = 0; k < p->outputs; k++) x->v[k] += x->w[k] * x->z[k];
    }
    for (int64_t k = 0; k < p->outputs; k++) x->v[k] = choose(live, x->v[k], all(0.0));
    for (int64_t i = 0; i < p->rows; i += TILE) apply(p, x->v, i, 1, x->step + i);
    if (s->g_multipliers) {
        read_rows(p, x->residual, s->g_multipliers, p->constraints, first, s->samples, s->single);
        for (int64_t i = 0; i < p->rows; i++)
            x->step[i] += choose(live, x->residual[i], all(0.0));
    }
    mask fine = live | ~live;
    if (!p->inverse) {
        form_gram(p, x->w, x->gram);
        factorise(p, x->gram, x->diagonal, &fine);
    }
    solve_gram(p, x->gram, x->diagonal, x->step, x->y);
    for (int64_t i = 0; i < p->kept; i++) {
        fine &= absolute(x->step[i]) < INFINITY;
        x->step[i] = choose(live, x->step[i], all(0.0));
    }
    for (int64_t k = 0; k < p->outputs; k += TILE) {
        lanes sum[TILE];
        adjoint(p, x->step, k, sum);
        for (int t = 0; t < TILE; t++) x->v[k + t] -= x->w[k + t] * sum[t];
    }
    for (int64_t k = 0; k < p->outputs; k++) x->v[k] = choose(live, x->v[k], all(0.0));
    write_outputs(p, x->v, s->dv, first, s->samples, s->single);
    write_rows(p, x->step, s->db, first, s->samples, s->single);
    for (int l = 0; l < LANES && first + l < s->samples; l++) {
        s->solved[first + l] = fine[l] || !live[l];
        if (!s->solved[first + l]) __atomic_fetch_add(&s->unsolved, 1, __ATOMIC_RELAXED);
    }
}

/* Σψ(y) − yᵀv − bᵀλ + Σφ(u): see losses.py */
PART void loss_block(const Plan *p, Loss *s, Work *x, int64_t first) {
    lanes loss = all(0.0);
    read_outputs(p, x->v, s->v, first, s->samples, s->single);
    read_outputs(p, x->z, s->y, first, s->samples, s->single);
    read_outputs(p, x->u, s->u, first, s->samples, s->single);
    read_rows(p, x->b, s->b, s->b_stride, first, s->samples, s->single);
    read_rows(p, x->multipliers, s->multipliers, p->constraints, first, s->samples, s->single);
    for (int64_t k = 0; k < p->given; k++) {
        const Kind kind = p->kind[k];
        lanes y = x->z[k], u = x->u[k], psi, phi;
        if (p->plain[k]) {
            psi = negative_entropy(kind, y);
            phi = integral(kind, u);
        } else {
            double size = p->scale[k] * p->temperature[k];
            lanes z = (y - p->shift[k]) / p->scale[k];
            if (p->upper[k] < INFINITY) { /* the ends go to the ends exactly */
                z = choose(y == p->lower[k], all(kind == TANH ? -1.0 : 0.0), z);
                z = choose(y == p->upper[k], all(1.0), z);
            }
            psi = size * negative_entropy(kind, z);
            phi = p->shift[k] * u + size * integral(kind, u / p->temperature[k]);
        }
        loss += psi - y * x->v[k] + phi;
    }
    for (int64_t i = 0; i < p->rows; i++) loss -= x->b[i] * x->multipliers[i];
    for (int l = 0; l < LANES && first + l < s->samples; l++)
        put(s->loss, first + l, s->single, loss[l]);
}

/* Room for one thread; NULL where there is none. */
static void *make_room(const Plan *p, Work *x) {
    int64_t outputs = p->outputs, rows = p->rows, longest = outputs > rows ? outputs : rows;
    int64_t gram = p->inverse ? 0 : triangle(p->kept);
    lanes **parts[] = {&x->v,        &x->u,           &x->z,    &x->w, &x->b,    &x->size,
                       &x->residual, &x->multipliers, &x->step, &x->trial, &x->y, &x->gram, &x->diagonal};
    int64_t sizes[] = {outputs, outputs, outputs, outputs, rows, rows,
                       rows,    rows,    rows,    rows, longest, gram, p->kept};
    int64_t total = 0;
    for (int i = 0; i < 13; i++) total += sizes[i];
    char *memory = malloc((total + 1) * sizeof(lanes));
    if (!memory) return NULL;
    lanes *at = (lanes *)(((uintptr_t)memory + sizeof(lanes) - 1) / sizeof(lanes) * sizeof(lanes));
    for (int i = 0; i < 13; i++, at += sizes[i - 1]) *parts[i] = at;
    return memory;
}

#define EACH_BLOCK(type, work_on)                                               \
    (type * s) {                                                                \
        Work work;                                                              \
        void *memory = make_room(s->plan, &work);                               \
        while (memory) {                                                        \
            int64_t first = __atomic_fetch_add(&s->next, LANES, __ATOMIC_RELAXED); \
            if (first >= s->samples) break;                                     \
            TIMED(ALL, work_on(s->plan, s, &work, first));                      \
        }                                                                       \
        free(memory);                                                           \
    }

void VARIANT(taut_solve) EACH_BLOCK(Solve, solve_block)
void VARIANT(taut_backward) EACH_BLOCK(Backward, backward_block)
void VARIANT(taut_loss) EACH_BLOCK(Loss, loss_block)

#endif
