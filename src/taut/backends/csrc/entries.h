/* The calls, for one kind of processor: VARIANT(name) is what they are called. */
#include "training.h"
#include "pullback.h"

/* `counts` says which samples nobody works on. */
#define EACH_BLOCK(type, counts, work_on)                                       \
    (type * s) {                                                                \
        Work work;                                                              \
        void *memory = make_room(counts->plan, &work);                          \
        while (memory) {                                                        \
            int64_t first = __atomic_fetch_add(&counts->next, LANES, __ATOMIC_RELAXED); \
            if (first >= counts->samples) break;                                \
            TIMED(ALL, work_on(counts->plan, s, &work, first));                 \
        }                                                                       \
        if (memory) free(work.sample_memory);                                   \
        free(memory);                                                           \
    }

void VARIANT(taut_solve) EACH_BLOCK(Solve, s, solve_block)
void VARIANT(taut_backward) EACH_BLOCK(Backward, s, backward_block)
void VARIANT(taut_loss) EACH_BLOCK(Loss, s, loss_block)
void VARIANT(taut_train) EACH_BLOCK(Train, s->solve, train_block)

void VARIANT(taut_stable)(Stable *s) {
    Sample one;
    void *memory = make_sample(&one, s->equations, s->outputs);
    while (memory) {
        int64_t n = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (n >= s->samples) break;
        stable_block(s, &one, n);
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
