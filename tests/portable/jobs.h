/* One call of the kernel, made of a section, and what it is to be compared with. */
#ifndef TAUT_JOBS_H
#define TAUT_JOBS_H

#include <math.h>
#include <pthread.h>

#include "arrays.h"
#include "calls.h"

#define DECLARE(variant)                      \
    void taut_solve_##variant(Solve *);       \
    void taut_backward_##variant(Backward *); \
    void taut_loss_##variant(Loss *);         \
    void taut_train_##variant(Train *);       \
    void taut_within_##variant(Within *);     \
    void taut_pull_##variant(Pull *);
#define VARIANT(variant)                                                                 \
    { #variant, taut_solve_##variant, taut_backward_##variant, taut_loss_##variant,      \
      taut_train_##variant, taut_within_##variant, taut_pull_##variant }
int64_t taut_newest(void);
DECLARE(v2)

typedef struct {
    const char *name;
    void (*solve)(Solve *);
    void (*backward)(Backward *);
    void (*loss)(Loss *);
    void (*train)(Train *);
    void (*within)(Within *);
    void (*pull)(Pull *);
} Variant;

#ifdef __x86_64__
DECLARE(v3)
DECLARE(v4)
static const Variant VARIANTS[] = {VARIANT(v2), VARIANT(v3), VARIANT(v4)};
#else
static const Variant VARIANTS[] = {VARIANT(v2)};
#endif

typedef struct {
    const char *name;
    int64_t width; /* numbers of each sample */
    int64_t bytes; /* of all samples */
    void *data;
} Found;

typedef struct {
    const Variant *variant;
    char kind; /* the first letter of the call */
    union {
        Solve solve;
        Backward backward;
        Loss loss;
        Train train;
        Within within;
        Pull pull;
    } call;
    Solve step; /* what the call of a training step names */
    int64_t samples, unsolved, single;
    int8_t *solved; /* what the answers say; NULL for loss and training, which are always found */
    int count;
    Found found[6];
} Job;

typedef struct {
    Plan plan;
    Rules rules;
    Line line; /* of inequalities, where σ is one */
    int has_line;
    const double *lowest, *highest, *norm; /* of inequalities, as these */
    const int64_t *only;
    int64_t equations;
} Problem;

/* The fields that calls.h lists, by their names; an array that is missing is NULL. */
static Problem make_problem(const Section *s) {
#define FIELD(type, name)                                                           \
    .name = _Generic((type){0}, int64_t: integer(s, #name), double: real(s, #name), \
                     default: data(s, #name)),
    Problem made = {.plan = {PLAN(FIELD)}, .rules = {RULES(FIELD)}};
#undef FIELD
#define FIELD(type, name)                                                          \
    .name = _Generic((type){0}, int64_t: integer(s, "line_" #name),                \
                     double: real(s, "line_" #name), default: data(s, "line_" #name)),
    made.has_line = find(s, "line_rows") != NULL;
    if (made.has_line) made.line = (Line){LINE(FIELD)};
#undef FIELD
    made.lowest = data(s, "lowest"), made.highest = data(s, "highest");
    made.norm = data(s, "norm"), made.only = data(s, "only");
    made.equations = find(s, "first_of_G") ? integer(s, "first_of_G") : 0;
    return made;
}

static void *wants(Job *job, const char *name, int64_t width, int64_t size) {
    Found *found = &job->found[job->count++];
    *found = (Found){name, width, job->samples * width * size, NULL};
    found->data = room(found->bytes);
    memset(found->data, 0xff, found->bytes); /* NaN, and −1: open */
    return found->data;
}

/* What a call writes over, as it was before */
static void *begins(Job *job, const Section *s, const char *name, int64_t width, int64_t size) {
    char given[40];
    void *made = wants(job, name, width, size);
    snprintf(given, sizeof given, "begun_%s", name);
    const Array *array = find(s, given);
    if (array) memcpy(made, array->data, array->bytes);
    return made;
}

static Within make_within(Job *job, const Section *s, const Problem *problem) {
    int64_t size = job->single ? 4 : 8, K = problem->plan.given, I = problem->plan.constraints;
    return (Within){
        .plan = &problem->plan, .line = problem->has_line ? &problem->line : NULL,
        .rules = &problem->rules, .lowest = problem->lowest, .highest = problem->highest,
        .norm = problem->norm, .only = problem->only, .equations = problem->equations,
        .v = data(s, "v"), .lower = data(s, "lower"), .upper = data(s, "upper"),
        .floor = data(s, "floor"), .ceiling = data(s, "ceiling"), .start = data(s, "start"),
        .multipliers = begins(job, s, "multipliers", I, size), .u = begins(job, s, "u", K, size),
        .z = begins(job, s, "z", K, size), .residual = begins(job, s, "residual", 1, size),
        .iterations = begins(job, s, "iterations", 1, 8),
        .status = begins(job, s, "status", 1, 8), .begun = integer(s, "begun"),
        .samples = job->samples, .single = job->single, .limit = integer(s, "limit"),
        .inner = integer(s, "inner"), .unsolved = job->samples, .target = real(s, "target"),
        .cap = real(s, "cap"), .slack = real(s, "slack"), .huge = real(s, "huge"),
    };
}

static Pull make_pull(Job *job, const Section *s, const Problem *problem) {
    int64_t size = job->single ? 4 : 8, K = problem->plan.given, I = problem->plan.constraints;
    const int bounds = find(s, "floor") != NULL;
    return (Pull){
        .plan = &problem->plan, .line = problem->has_line ? &problem->line : NULL,
        .rules = &problem->rules, .u = data(s, "u"), .multipliers = data(s, "multipliers"),
        .lower = data(s, "lower"), .upper = data(s, "upper"), .floor = data(s, "floor"),
        .ceiling = data(s, "ceiling"), .g_multipliers = data(s, "g_multipliers"),
        .g_u = data(s, "g_u"), .g_z = data(s, "g_z"), .status = data(s, "status"),
        .dv = wants(job, "dv", K, size), .dlower = wants(job, "dlower", I, size),
        .dupper = wants(job, "dupper", I, size),
        .dfloor = bounds ? wants(job, "dfloor", K, size) : NULL,
        .dceiling = bounds ? wants(job, "dceiling", K, size) : NULL,
        .left = wants(job, "left", 1, 1), .samples = job->samples, .single = job->single,
        .unsolved = job->samples,
    };
}

static void make_train(Job *job, const Section *s, const Problem *problem) {
    int64_t size = job->single ? 4 : 8, K = problem->plan.given, I = problem->plan.constraints;
    void *table = find(s, "begun_table") ? begins(job, s, "table", I, size) : NULL;
    job->step = (Solve){
        .plan = &problem->plan, .rules = &problem->rules, .v = data(s, "v"), .b = data(s, "b"),
        .start = table, .index = data(s, "index"),
        .multipliers = wants(job, "multipliers", I, size), .samples = job->samples,
        .single = job->single, .b_stride = integer(s, "b_stride"), .limit = integer(s, "limit"),
        .unsolved = job->samples, .target = real(s, "target"), .cap = real(s, "cap"),
        .share = real(s, "share"), .slack = real(s, "slack"), .huge = real(s, "huge"),
    };
    job->call.train = (Train){
        .y = data(s, "y"), .loss = wants(job, "loss", 1, size), .dv = wants(job, "dv", K, size),
        .scale = real(s, "scale"), .table = table, .entries = job->samples,
        .unsolved = job->samples,
    };
}

static Job make_job(const Section *s, const Problem *problem, const Variant *variant) {
    const Plan *plan = &problem->plan;
    const Rules *rules = &problem->rules;
    Job job = {.variant = variant, .kind = *(char *)s->arrays[0].data};
    int64_t n = job.samples = integer(s, "samples"), single = job.single = integer(s, "single");
    int64_t size = single ? 4 : 8, K = plan->given, I = plan->constraints;
    if (job.kind == 's')
        job.call.solve = (Solve){
            .plan = plan, .rules = rules,
            .v = data(s, "v"), .b = data(s, "b"), .start = data(s, "start"),
            .multipliers = wants(&job, "multipliers", I, size), .u = wants(&job, "u", K, size),
            .z = wants(&job, "z", K, size), .residual = wants(&job, "residual", 1, size),
            .iterations = wants(&job, "iterations", 1, 8), .status = wants(&job, "status", 1, 8),
            .samples = n, .single = single, .b_stride = integer(s, "b_stride"),
            .limit = integer(s, "limit"), .unsolved = n, .target = real(s, "target"),
            .cap = real(s, "cap"), .share = real(s, "share"), .slack = real(s, "slack"),
            .huge = real(s, "huge"),
        };
    else if (job.kind == 'b')
        job.call.backward = (Backward){
            .plan = plan, .rules = rules,
            .u = data(s, "u"), .g_multipliers = data(s, "g_multipliers"),
            .g_u = data(s, "g_u"), .g_z = data(s, "g_z"), .status = data(s, "status"),
            .dv = wants(&job, "dv", K, size), .db = wants(&job, "db", I, size),
            .samples = n, .single = single, .unsolved = n,
        };
    else if (job.kind == 'w')
        job.call.within = make_within(&job, s, problem);
    else if (job.kind == 'p')
        job.call.pull = make_pull(&job, s, problem);
    else if (job.kind == 't')
        make_train(&job, s, problem);
    else
        job.call.loss = (Loss){
            .plan = plan, .v = data(s, "v"), .b = data(s, "b"), .y = data(s, "y"),
            .u = data(s, "u"), .multipliers = data(s, "multipliers"),
            .loss = wants(&job, "loss", 1, size), .samples = n, .single = single,
            .b_stride = integer(s, "b_stride"), .unsolved = n,
        };
    if (job.kind != 'l' && job.kind != 't') job.solved = room(n);
    return job;
}

static void *work(void *given) {
    Job *job = given;
    if (job->kind == 's') job->variant->solve(&job->call.solve);
    if (job->kind == 'b') job->variant->backward(&job->call.backward);
    if (job->kind == 'l') job->variant->loss(&job->call.loss);
    if (job->kind == 't') job->variant->train(&job->call.train);
    if (job->kind == 'w') job->variant->within(&job->call.within);
    if (job->kind == 'p') job->variant->pull(&job->call.pull);
    return NULL;
}

/* By its status, or because its ∂b are numbers */
static int is_solved(const Job *job, int64_t sample) {
    const Backward *s = &job->call.backward;
    if (job->kind == 's') return job->call.solve.status[sample] == 0;
    if (job->kind == 'w') return job->call.within.status[sample] == 0;
    if (job->kind == 'p') return !job->call.pull.left[sample];
    for (int64_t i = 0, I = s->plan->constraints; i < I; i++)
        if (isnan(entry(s->db, sample * I + i, s->single))) return 0;
    return 1;
}

/* The threads share the call, as those of cpu.py do: each takes the next samples. */
static void run(Job *job, int threads) {
    pthread_t others[64];
    if (job->kind == 't') job->call.train.solve = &job->step;
    for (int t = 1; t < threads; t++)
        if (pthread_create(&others[t], NULL, work, job)) stop("no threads", "");
    work(job);
    for (int t = 1; t < threads; t++) pthread_join(others[t], NULL);
    job->unsolved = job->kind == 's'   ? job->call.solve.unsolved
                    : job->kind == 'b' ? job->call.backward.unsolved
                    : job->kind == 't' ? job->call.train.unsolved
                    : job->kind == 'w' ? job->call.within.unsolved
                    : job->kind == 'p' ? job->call.pull.unsolved
                                       : job->call.loss.unsolved;
    for (int64_t i = 0; job->solved && i < job->samples; i++) job->solved[i] = is_solved(job, i);
}

static void free_job(Job *job) {
    for (int i = 0; i < job->count; i++) free(job->found[i].data);
    free(job->solved);
}

#endif
