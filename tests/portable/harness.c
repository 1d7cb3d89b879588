/* Runs the problems that record.py has stored, on any architecture: without Python, torch and
 * OpenMP.
 *
 *     harness problems VARIANT [THREADS]
 *
 * Every call is made by one thread, and its answers may differ from those recorded by what the file
 * says rounding allows; that a sample is solved may differ only where rounding decides it. With
 * THREADS every call is made again by so many at once, which must find the same bits, and all of it
 * once more in a forked child. Ends with 0; with 1 where something is wrong; with 77 where the
 * processor lacks the variant. */
#include <sys/wait.h>
#include <unistd.h>

#include "shaken.h"

/* So many of the samples may be solved or not, as rounding decides. */
#define EITHER 1e-3

typedef struct {
    const char *problem;
    int calls, wrong;
    int64_t samples, solved, either;
    double worst[2]; /* difference over what is allowed, in float64 and float32 */
} Report;

static void complain(Report *report, const Job *job, const char *what, int64_t sample) {
    if (report->wrong++ < 20)
        fprintf(stderr, "%s, %s of %s: %s, sample %lld\n", job->variant->name,
                job->kind == 's'   ? "solve"
                : job->kind == 'b' ? "backward"
                : job->kind == 't' ? "train"
                : job->kind == 'w' ? "within"
                : job->kind == 'p' ? "pull"
                                   : "loss",
                report->problem, what, (long long)sample);
}

/* The numbers of the samples that are solved, here and when recorded */
static void compare(const Section *section, const Job *job, const Found *found, Report *report) {
    char name[40];
    snprintf(name, sizeof name, "within_%s", found->name);
    const Array *expected = find(section, found->name), *within = find(section, name);
    const int8_t *recorded = data(section, "solved");
    if (!within) return;
    if (!expected || expected->bytes != found->bytes ||
        within->bytes != job->samples * found->width * 8)
        stop("another size was recorded of ", found->name);
    for (int64_t i = 0; i < job->samples * found->width; i++) {
        int64_t sample = i / found->width;
        if (job->solved && !(job->solved[sample] && recorded[sample])) continue;
        double one = entry(found->data, i, job->single);
        double other = entry(expected->data, i, job->single);
        double difference = one == other ? 0.0 : fabs(one - other); /* both may be infinite */
        double allowed = ((double *)within->data)[i], *worst = &report->worst[job->single];
        if (difference > 0 && difference / allowed > *worst) *worst = difference / allowed;
        if (!(difference <= allowed)) complain(report, job, found->name, sample);
    }
}

static void check_verdicts(const Section *section, const Job *job, Report *report) {
    int64_t unsolved = 0;
    const int8_t *expected = data(section, "solved");
    for (int64_t i = 0; job->solved && i < job->samples; i++) {
        unsolved += !job->solved[i];
        if (job->solved[i] == expected[i]) continue;
        if (job->kind == 's' && rounding_decides(section, job, i))
            report->either++;
        else
            complain(report, job, expected[i] ? "no longer solved" : "not solved before", i);
    }
    if (job->solved ? job->unsolved != unsolved : job->unsolved > 0)
        complain(report, job, "the number not solved", job->unsolved);
    report->samples += job->samples;
    report->solved += job->samples - unsolved;
}

/* Is it the same, bit for bit, by so many threads? */
static int repeats(const Section *section, const Problem *problem, const Job *first, int threads) {
    int same = 1;
    Job again = make_job(section, problem, first->variant);
    run(&again, threads);
    for (int i = 0; i < again.count; i++)
        same &= !memcmp(again.found[i].data, first->found[i].data, again.found[i].bytes);
    same &= again.solved ? again.unsolved == first->unsolved : again.unsolved <= 0;
    free_job(&again);
    return same;
}

static void make_call(const Section *section, const Problem *problem, const Variant *variant,
                      int threads, Report *report) {
    Job job = make_job(section, problem, variant);
    run(&job, 1);
    check_verdicts(section, &job, report);
    for (int i = 0; i < job.count; i++) compare(section, &job, &job.found[i], report);
    report->calls++;
    if (threads > 1 && !repeats(section, problem, &job, threads))
        complain(report, &job, "other bits by threads", -1);
    free_job(&job);
}

static Report run_all(const char *path, const Variant *variant, int threads) {
    FILE *file = open_problems(path);
    Report report = {.problem = "?"};
    Section fields = {.count = 0};
    Array ahead = {.name = ""};
    Problem problem;
    read_section(file, &ahead); /* nothing comes before the first problem */
    while (ahead.name[0]) {
        Section section = read_section(file, &ahead);
        if (!strcmp(section.arrays[0].name, "problem")) {
            free_section(&fields);
            fields = section;
            problem = make_problem(&fields);
            report.problem = section.arrays[0].data;
        } else {
            make_call(&section, &problem, variant, threads, &report);
            free_section(&section);
        }
    }
    free_section(&fields);
    fclose(file);
    return report;
}

/* Says what was found, and whether that is right. */
static int good(const Report *report, const char *title) {
    printf("%s: %d calls, %lld samples, %lld solved, %lld either way, %d wrong; "
           "of what rounding allows at most %.2g in float64, %.2g in float32\n",
           title, report->calls, (long long)report->samples, (long long)report->solved,
           (long long)report->either, report->wrong, report->worst[0], report->worst[1]);
    fflush(stdout);
    return report->calls > 0 && !report->wrong && report->either <= EITHER * report->samples;
}

/* All of it once more in a child, which has none of the threads of its parent */
static int good_in_a_child(const char *path, const Variant *variant, int threads) {
    int status;
    pid_t child = fork();
    if (child < 0) stop("cannot fork", "");
    if (child == 0) {
        Report report = run_all(path, variant, threads);
        _exit(!good(&report, "in a forked child"));
    }
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int count, char **words) {
    const Variant *variant = NULL;
    if (count < 3) stop("give a file and a variant", "");
    int threads = count > 3 ? atoi(words[3]) : 1;
    if (threads < 1 || threads > 64) stop("threads are 1 to 64, not ", words[3]);
    for (size_t i = 0; i < sizeof VARIANTS / sizeof *VARIANTS; i++)
        if (!strcmp(words[2], VARIANTS[i].name)) variant = &VARIANTS[i];
    if (!variant || variant->name[1] - '0' > taut_newest()) {
        printf("%s: not for this processor\n", words[2]);
        return 77;
    }
    Report report = run_all(words[1], variant, threads);
    int fine = good(&report, variant->name);
    if (threads > 1) fine &= good_in_a_child(words[1], variant, threads);
    return !fine;
}
