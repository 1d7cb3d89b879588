/* The samples of a solve, or of a training step, block by block: by mixed.h, and what that leaves by
 * newton.h. */
#ifndef TAUT_BLOCKS_H
#define TAUT_BLOCKS_H

#include "mixed.h"
#include "training.h"

/* All of one thread */
typedef struct {
    Work works[2 * ABREAST], *each[ABREAST][2];
    Team team;
    void *memory[3 * ABREAST];
} Thread;

/* Room for so many groups, or, with none, for one block */
static int make_thread(const Plan *p, Thread *x, int groups) {
    int found = 1;
    memset(x->memory, 0, sizeof x->memory);
    for (int i = 0; i < 2 * groups || !i; i++) {
        x->each[i / 2][i % 2] = &x->works[i];
        found &= (x->memory[i] = make_room(p, &x->works[i])) != NULL;
    }
    for (int h = 0; h < groups; h++)
        found &= (x->memory[2 * ABREAST + h] = make_group(p, &x->team.group[h])) != NULL;
    return found;
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

/* A group of samples, into lanes; returns how many blocks it has, and where it is to be solved */
INLINE int read_group(const Plan *p, const Solve *s, Group *g, Work *const *x, int64_t first, flags *open) {
    const int halves = first + LANES < s->samples ? 2 : 1;
    mask fine[2];
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
    *open = narrowed_flags(fine[0], fine[halves - 1]);
    return halves;
}

/* What came of a block of a group; the samples that are left, from where they are */
PART void finish_block(const Plan *p, Solve *s, Train *train, const Way *way, Work *x, int half, int64_t first,
                       mask solved) {
    const mask near = widened_flags(way->near, half);
    const lanes count = widened(way->count, half);
    solved &= fits(p, s, x);
    write_samples(p, s, train, x, first, solved, solved, count);
    if (!any(~solved)) return;
    memcpy(x->step, x->multipliers, p->kept * sizeof(lanes));
    read_block(p, s, x, first);
    for (int64_t i = 0; i < p->kept; i++)
        x->multipliers[i] = choose(near, x->step[i], x->multipliers[i]);
    solve_block(p, s, train, x, first, ~solved, choose(near, count, all(0.0)));
}

/* One or two groups: in float32, then in float64, then the samples that are left */
PART void solve_team(const Plan *p, Solve *s, Train *train, Thread *t, int64_t first, int64_t count) {
    Team *team = &t->team;
    int halves[ABREAST];
    flags open[ABREAST];
    mask solved[ABREAST][2];
    team->count = count > SAMPLES ? 2 : 1;
    for (int h = 0; h < team->count; h++)
        halves[h] = read_group(p, s, &team->group[h], t->each[h], first + h * SAMPLES, &open[h]);
    approach(p, s, team, open);
    if (s->target > COARSE && p->constraints == p->worked)
        end_loosely(p, s, team, (Work *const(*)[2])t->each, halves, solved);
    else
        for (int h = 0; h < team->count; h++)
            end_tightly(p, s, team, h, t->each[h], halves[h], solved[h]);
    for (int h = 0; h < team->count; h++)
        for (int i = 0; i < halves[h]; i++)
            finish_block(p, s, train, &team->way[h], t->each[h][i], i, first + h * SAMPLES + i * LANES,
                         solved[h][i]);
}

/* How many samples a thread takes at once: two groups, but one where there are not enough for all */
INLINE int64_t share_of(const Plan *p, const Solve *s) {
    const int64_t next = __atomic_load_n(&s->next, __ATOMIC_RELAXED);
    if (!p->worked || s->limit < LIMIT) return LANES;
    return s->samples - next >= 2 * ABREAST * SAMPLES ? ABREAST * SAMPLES : SAMPLES;
}

/* The work of one thread: each takes the next samples that nobody works on. */
static void solve_all(const Plan *p, Solve *s, Train *train) {
    Thread thread;
    const int groups = !p->worked ? 0 : s->samples > SAMPLES ? ABREAST : 1;
    for (int ready = make_thread(p, &thread, groups); ready;) {
        const int64_t size = share_of(p, s);
        int64_t first = __atomic_fetch_add(&s->next, size, __ATOMIC_RELAXED);
        if (first >= s->samples) break;
        const int64_t count = first + size < s->samples ? size : s->samples - first;
        if (train && (__atomic_load_n(&train->stopped, __ATOMIC_RELAXED) ||
                      !remembered(train, first, count))) {
            /* nothing more is solved, and the caller says why */
        } else if (p->worked && s->limit >= LIMIT) {
            TIMED(ALL, solve_team(p, s, train, &thread, first, count));
        } else {
            Work *x = thread.each[0][0];
            read_block(p, s, x, first);
            TIMED(ALL, solve_block(p, s, train, x, first, all(0.0) == all(0.0), all(0.0)));
        }
        if (train && __atomic_add_fetch(&train->seen, count, __ATOMIC_ACQ_REL) == s->samples)
            finish_training(p, train);
    }
    for (int i = 0; i < 3 * ABREAST; i++) free(thread.memory[i]);
}

#endif
