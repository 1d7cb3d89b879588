/* The calls, for one kind of processor: VARIANT(name) is what they are called. */
#include "blocks.h"
#include "pullback.h"
#include "one_arc.h"
#include "one_path.h"

#define EACH_BLOCK(type, work_on)                                               \
    (type * s) {                                                                \
        Work work;                                                              \
        void *memory = make_room(s->plan, &work);                               \
        while (memory) {                                                        \
            int64_t first = __atomic_fetch_add(&s->next, LANES, __ATOMIC_RELAXED); \
            if (first >= s->samples) break;                                     \
            TIMED(ALL, work_on(s->plan, s, &work, first));                      \
        }                                                                       \
        if (memory) free(work.sample_memory);                                   \
        free(memory);                                                           \
    }

void VARIANT(taut_backward) EACH_BLOCK(Backward, backward_block)
void VARIANT(taut_loss) EACH_BLOCK(Loss, loss_block)

void VARIANT(taut_solve)(Solve *s) { solve_all(s->plan, s, NULL); }
void VARIANT(taut_train)(Train *t) { solve_all(t->solve->plan, t->solve, t); }

void VARIANT(taut_stable)(Stable *s) {
    Sample one;
    void *memory = make_sample(&one, s->equations, s->outputs);
    while (memory) {
        int64_t n = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (n >= s->samples || !stable_block(s, &one, n)) break;
    }
    free(memory);
}

void VARIANT(taut_within)(Within *s) {
    Sides sides;
    Path path = {.memory = NULL};
    void *memory = make_sides(s->plan, &sides);
    while (memory) {
        int64_t first = __atomic_fetch_add(&s->next, LANES, __ATOMIC_RELAXED);
        if (first >= s->samples) break;
        within_block(s->plan, s, &sides, &path, first);
    }
    free(path.memory);
    free(memory);
}

void VARIANT(taut_pull)(Pull *s) {
    Pulling room;
    void *memory = make_pulling(s->plan, &room);
    while (memory) {
        int64_t first = __atomic_fetch_add(&s->next, LANES, __ATOMIC_RELAXED);
        if (first >= s->samples) break;
        pull_block(s->plan, s, &room, first);
    }
    if (memory) free(room.sample_memory);
    free(memory);
}

void VARIANT(taut_one)(One *s) {
    Alone room;
    void *memory = make_alone(s, &room);
    while (memory) {
        int64_t n = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (n >= s->samples) break;
        one_sample(s, &room, n);
    }
    free(memory);
}

void VARIANT(taut_trail)(Trail *s) {
    Walk room;
    void *memory = make_walk(s, &room);
    while (memory) {
        int64_t n = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (n >= s->samples) break;
        walk_sample(s, &room, n);
    }
    free(memory);
}
