/* The samples of a solve, or of a training step, block by block: by mixed.h, and what that leaves by
 * newton.h. */
#ifndef TAUT_BLOCKS_H
#define TAUT_BLOCKS_H

#include "mixed.h"
#include "training.h"

/* All of one thread */
typedef struct {
    Work works[2], *each[2];
    Group group;
    void *memory[3];
} Thread;

static int make_thread(const Plan *p, Thread *x) {
    x->memory[0] = make_room(p, &x->works[0]);
    x->memory[1] = p->worked ? make_room(p, &x->works[1]) : NULL;
    x->memory[2] = p->worked ? make_group(p, &x->group) : NULL;
    x->each[0] = &x->works[0];
    x->each[1] = &x->works[1];
    return x->memory[0] && (!p->worked || (x->memory[1] && x->memory[2]));
}

/* `train` is NULL for a solve alone. */
INLINE void write_samples(const Plan *p, Solve *s, Train *train, Work *x, int64_t first, mask which,
                          mask solved, lanes iterations) {
    if (!any(which)) return;
    if (train)
        write_training(p, train, x, first, which);
    else
        write_solution(p, s, x, first, which, solved, iterations);
    int64_t count = 0, left = 0;
    for (int l = 0; l < LANES && first + l < s->samples; l++) {
        count += which[l] && solved[l];
        left += which[l] && !solved[l];
    }
    __atomic_fetch_sub(&s->unsolved, count, __ATOMIC_RELAXED);
    if (train && left) __atomic_store_n(&train->stopped, 1, __ATOMIC_RELAXED);
}

/* The samples in `which`, all the way in float64, after so many iterations */
PART void solve_block(const Plan *p, Solve *s, Train *train, Work *x, int64_t first, mask which,
                      lanes before) {
    lanes iterations;
    mask solved = solve_lanes(p, s, x, which, &iterations);
    iterations += before;
    solved &= iterations <= (double)s->limit;
    write_samples(p, s, train, x, first, which, solved, iterations);
}

/* A group: in float32, then in float64, then those that are left */
PART void solve_group(const Plan *p, Solve *s, Train *train, Thread *t, int64_t first) {
    Work *const *x = t->each;
    Group *g = &t->group;
    const int halves = first + LANES < s->samples ? 2 : 1;
    Way way;
    mask fine[2], solved[2];
    for (int h = 0; h < halves; h++) {
        read_block(p, s, x[h], first + h * LANES);
        fine[h] = ~at_end(p, s, x[h]);
    }
    /* Where there is one block only, it is on both sides. */
    const Work *other = x[halves - 1];
    for (int64_t k = 0; k < p->given; k++) g->v[k] = narrowed(x[0]->v[k], other->v[k]);
    for (int64_t i = 0; i < p->worked; i++) {
        g->b[i] = narrowed(x[0]->b[i], other->b[i]);
        g->multipliers[i] = narrowed(x[0]->multipliers[i], other->multipliers[i]);
    }
    approach(p, s, g, narrowed_flags(fine[0], fine[halves - 1]), &way);
    if (s->target > COARSE && p->constraints == p->worked)
        end_loosely(p, s, g, x, halves, &way, solved);
    else
        end_tightly(p, s, g, x, halves, &way, solved);
    for (int h = 0; h < halves; h++) {
        const int64_t at = first + h * LANES;
        mask near = widened_flags(way.near, h);
        lanes count = widened(way.count, h);
        solved[h] &= fits(p, s, x[h]);
        write_samples(p, s, train, x[h], at, solved[h], solved[h], count);
        if (!any(~solved[h])) continue;
        memcpy(x[h]->step, x[h]->multipliers, p->kept * sizeof(lanes));
        read_block(p, s, x[h], at);
        for (int64_t i = 0; i < p->kept; i++)
            x[h]->multipliers[i] = choose(near, x[h]->step[i], x[h]->multipliers[i]);
        solve_block(p, s, train, x[h], at, ~solved[h], choose(near, count, all(0.0)));
    }
}

/* The work of one thread: each takes the next samples that nobody works on. */
static void solve_all(const Plan *p, Solve *s, Train *train) {
    Thread thread;
    const int64_t size = p->worked ? SAMPLES : LANES;
    for (int ready = make_thread(p, &thread); ready;) {
        int64_t first = __atomic_fetch_add(&s->next, size, __ATOMIC_RELAXED);
        if (first >= s->samples) break;
        const int64_t count = first + size < s->samples ? size : s->samples - first;
        if (train && (__atomic_load_n(&train->stopped, __ATOMIC_RELAXED) ||
                      !remembered(train, first, count))) {
            /* nothing more is solved, and the caller says why */
        } else if (p->worked && s->limit >= LIMIT) {
            TIMED(ALL, solve_group(p, s, train, &thread, first));
        } else {
            for (int64_t at = first; at < first + count; at += LANES) {
                read_block(p, s, thread.each[0], at);
                mask which = all(0.0) == all(0.0);
                TIMED(ALL, solve_block(p, s, train, thread.each[0], at, which, all(0.0)));
            }
        }
        if (train && __atomic_add_fetch(&train->seen, count, __ATOMIC_ACQ_REL) == s->samples)
            finish_training(p, train);
    }
    for (int i = 0; i < 3; i++) free(thread.memory[i]);
}

#endif
