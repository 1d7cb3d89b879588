/* Does rounding decide whether a sample is solved? A sample that stops at the last digits may be
 * recognised as solved on one machine and be left to torch on another; both are right. */
#ifndef TAUT_SHAKEN_H
#define TAUT_SHAKEN_H

#include "jobs.h"

#define COPIES 4096
#define SHAKEN 0x1p-47 /* 32 units in the last place */

/* The numbers of one sample, as double, COPIES times, each a little different */
static double *copies(const void *x, int64_t width, int64_t sample, int64_t single, double shaken) {
    uint64_t state = 1;
    double *out = room(COPIES * width * sizeof *out);
    for (int64_t i = 0; i < COPIES * width; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX */
        double by = (double)(state >> 11) * 0x1p-52 - 1.0;
        out[i] = entry(x, sample * width + i % width, single) * (1.0 + shaken * by);
    }
    return out;
}

/* Are of the same sample, with v changed in the last places, some solved and some not? */
static int rounding_decides(const Section *s, const Job *job, int64_t sample) {
    const Plan *plan = job->call.solve.plan;
    int64_t solved = 0, K = plan->given, I = plan->constraints;
    Job shaken = {.variant = job->variant, .kind = 's', .samples = COPIES};
    double *v = copies(data(s, "v"), K, sample, job->single, SHAKEN);
    double *b = copies(data(s, "b"), I, sample, job->single, 0.0), *start = NULL;
    if (find(s, "start")) start = copies(data(s, "start"), I, sample, job->single, 0.0);
    Solve *call = &shaken.call.solve;
    *call = job->call.solve;
    call->v = v, call->b = b, call->start = start;
    call->multipliers = wants(&shaken, "multipliers", I, 8);
    call->u = wants(&shaken, "u", K, 8);
    call->z = wants(&shaken, "z", K, 8);
    call->residual = wants(&shaken, "residual", 1, 8);
    call->iterations = wants(&shaken, "iterations", 1, 8);
    call->status = wants(&shaken, "status", 1, 8);
    call->samples = call->unsolved = COPIES;
    call->single = call->next = 0;
    run(&shaken, 1);
    for (int64_t i = 0; i < COPIES; i++) solved += call->status[i] == 0;
    free_job(&shaken);
    free(v);
    free(b);
    free(start);
    return solved > 0 && solved < COPIES;
}

#endif
