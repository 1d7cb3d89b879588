/* Derivatives of one sample in the basis of its heaviest columns, outputs side by side: weighted
 * Gauss–Jordan elimination, see systems/stable.py. One sample at a time, so that no neighbour changes
 * its bits. */
#ifndef TAUT_STABLE_H
#define TAUT_STABLE_H

#include <stdlib.h>
#include <string.h>

#include "lanes.h"

/* Where a sanitizer checks addresses, the parts of the room lie apart, and it guards the gaps. */
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define GAP 4
#define GUARD(gap) ASAN_POISON_MEMORY_REGION(gap, GAP * sizeof(lanes))
#else
#define GAP 0
#define GUARD(gap)
#endif

/* As wide as the processor's vectors, here of outputs */
#define WIDTH LANES
#define FILL (2 * WIDTH)
typedef double wide __attribute__((vector_size(8 * WIDTH)));
typedef int64_t wide_mask __attribute__((vector_size(8 * WIDTH)));

#define LEAST_SLOPE 0x1.0p-955 /* smaller ones are raised: their products would underflow */
#define ROUNDING 1e-13         /* what is left of numbers so much larger */

INLINE wide wide_absolute(wide x) { return (wide)((wide_mask)x & INT64_MAX); }
INLINE wide wide_choose(wide_mask m, wide yes, wide no) {
    return (wide)((m & (wide_mask)yes) | (~m & (wide_mask)no));
}

INLINE int64_t padded(int64_t n) { return (n + FILL - 1) / FILL * FILL; }

/* All of one sample. Rows are filled up with zeros to a multiple of FILL. */
typedef struct {
    int64_t rows, outputs;               /* as filled up: of E and of T */
    int64_t equations, columns;          /* rows of both; outputs as they are */
    double *table;                       /* T and E side by side: equations × (outputs + rows) */
    double *made_of;                     /* the largest each entry of T has been made of; then G */
    double *triangle;                    /* Cholesky's factor of GGᵀ */
    double *w, *g_z, *g_u, *root, *x, *t; /* outputs */
    double *g_v, *s, *d, *y, *moved, *score; /* rows */
    const double **given;                /* the rows as they were loaded, or NULL */
    int64_t *place;                      /* the output that is the pivot of each row, or below 0 */
    int64_t lost;                        /* rows without a pivot that are not left out */
} Sample;

enum { NO_PIVOT = -1, LEFT_OUT = -2 };

/* Room for a sample of so many equations and outputs; NULL where there is none. */
static void *make_sample(Sample *x, int64_t equations, int64_t outputs) {
    int64_t K = x->outputs = padded(outputs), I = x->rows = padded(equations);
    int64_t n = x->equations = equations;
    x->columns = outputs;
    double *place, *given, **parts[] = {&x->table, &x->made_of, &x->triangle, &x->w,     &x->g_z, &x->g_u,
                                        &x->root,  &x->x,       &x->t,        &x->g_v,   &x->s,   &x->d,
                                        &x->y,     &x->moved,   &x->score,    &place,    &given};
    int64_t sizes[] = {n * (K + I), n * K, n * I, K, K, K, K, K, K, I, I, I, I, I, I, I, I};
    const int64_t gap = GAP * LANES;
    int64_t total = 8;
    for (int i = 0; i < 17; i++) total += sizes[i] + gap;
    char *memory = malloc(total * sizeof(double));
    if (!memory) return NULL;
    double *at = (double *)(((uintptr_t)memory + 63) / 64 * 64);
    for (int i = 0; i < 17; i++, at += gap) {
        *parts[i] = at;
        if (i > 2) memset(at, 0, sizes[i] * sizeof *at);
        at += sizes[i];
        GUARD((void *)at);
    }
    x->place = (int64_t *)place;
    x->given = (const double **)given;
    return memory;
}

/* 2^⌊e/share⌋ with x = m·2^e and m between ½ and 1: products with it are exact */
INLINE double power_of_two(double x, int share) {
    int exponent;
    frexp(x, &exponent);
    return ldexp(1.0, exponent >= 0 ? exponent / share : -((share - 1 - exponent) / share));
}

/* Row i of A, scaled to numbers of about 1; NULL: it takes no part. */
PART void load_row(Sample *x, int64_t i, const double *a, int64_t outputs) {
    double *row = x->table + i * (x->outputs + x->rows), *size = x->made_of + i * x->outputs;
    double largest = 0.0;
    memset(row, 0, (x->outputs + x->rows) * sizeof *row);
    for (int64_t k = 0; a && k < outputs; k++) largest = fabs(a[k]) > largest ? fabs(a[k]) : largest;
    double scale = largest > 0 ? 1.0 / power_of_two(largest, 1) : 1.0;
    for (int64_t k = 0; a && k < outputs; k++) row[k] = a[k] * scale;
    for (int64_t k = 0; k < x->outputs; k++) size[k] = fabs(row[k]);
    row[x->outputs + i] = scale;
    x->place[i] = a ? NO_PIVOT : LEFT_OUT;
    x->given[i] = a;
}

INLINE double inner(const double *a, const double *b, int64_t n) {
    const wide *x = (const wide *)a, *y = (const wide *)b;
    wide one = {0}, two = {0};
    for (int64_t k = 0; k < n / WIDTH; k += 2) {
        one += x[k] * y[k];
        two += x[k + 1] * y[k + 1];
    }
    one += two;
    double sum = one[0] + one[1];
    for (int l = 2; l < WIDTH; l++) sum += one[l];
    return sum;
}

INLINE void add_to(double *to, double factor, const double *from, int64_t n) {
    const wide *x = (const wide *)from;
    wide *y = (wide *)to;
    for (int64_t k = 0; k < n / WIDTH; k++) y[k] += factor * x[k];
}

INLINE double largest_of(wide x) {
    double most = x[0];
    for (int l = 1; l < WIDTH; l++) most = x[l] > most ? x[l] : most;
    return most;
}

INLINE double score_of(const Sample *x, const double *row) {
    const wide *t = (const wide *)row, *root = (const wide *)x->root;
    wide most = {0};
    for (int64_t k = 0; k < x->outputs / WIDTH; k++) {
        wide weighted = wide_absolute(t[k]) * root[k];
        most = wide_choose(weighted > most, weighted, most);
    }
    return largest_of(most);
}

/* row −= factor·pivot; what is only rounding becomes 0. Returns the new score. */
INLINE double eliminate(const Sample *x, double factor, const double *pivot, double *row,
                        double *size) {
    const wide *p = (const wide *)pivot, *root = (const wide *)x->root;
    wide *t = (wide *)row, *z = (wide *)size, most = {0};
    for (int64_t k = 0; k < x->outputs / WIDTH; k++) {
        wide change = factor * p[k], left = t[k] - change, made = wide_absolute(change);
        made = wide_choose(made > z[k], made, z[k]);
        z[k] = made;
        left = wide_choose(wide_absolute(left) <= ROUNDING * made, (wide){0}, left);
        t[k] = left;
        wide weighted = wide_absolute(left) * root[k];
        most = wide_choose(weighted > most, weighted, most);
    }
    add_to(row + x->outputs, -factor, pivot + x->outputs, x->rows);
    return largest_of(most);
}

/* T and E, with the largest |T_ik|·w_k^½ of all as the next pivot */
PART void rebase(Sample *x) {
    const int64_t length = x->outputs + x->rows, n = x->equations;
    for (int64_t i = 0; i < n; i++) x->score[i] = score_of(x, x->table + i * length);
    for (int64_t step = 0; step < n; step++) {
        int64_t i = -1, k = 0;
        for (int64_t j = 0; j < n; j++)
            if (x->place[j] < 0 && x->score[j] > (i < 0 ? 0.0 : x->score[i])) i = j;
        if (i < 0) break;
        double *pivot = x->table + i * length, *size = x->made_of + i * x->outputs;
        while (k < x->outputs - 1 && fabs(pivot[k]) * x->root[k] != x->score[i]) k++;
        const double inverse = 1.0 / pivot[k];
        for (int64_t j = 0; j < length; j++) pivot[j] *= inverse;
        for (int64_t j = 0; j < x->outputs; j++) size[j] *= fabs(inverse);
        pivot[k] = 1.0;
        x->place[i] = k;
        for (int64_t j = 0; j < n; j++) {
            double *row = x->table + j * length, factor = row[k];
            if (j == i || factor == 0.0) continue;
            x->score[j] = eliminate(x, factor, pivot, row, x->made_of + j * x->outputs);
            row[k] = 0.0;
        }
    }
    x->lost = 0;
    for (int64_t i = 0; i < n; i++) {
        x->lost += x->place[i] == NO_PIVOT;
        if (x->place[i] < 0) memset(x->table + i * length, 0, x->outputs * sizeof(double));
    }
}

/* y ← (GGᵀ)⁻¹y; a row without a pivot is one of the identity */
PART void solve_scaled(Sample *x) {
    const int64_t n = x->equations, I = x->rows, K = x->outputs;
    memset(x->triangle, 0, n * I * sizeof(double));
    for (int64_t i = 0; i < n; i++) {
        double *row = x->triangle + i * I;
        for (int64_t j = 0; j <= i; j++) {
            const double *other = x->triangle + j * I;
            double entry = inner(x->made_of + i * K, x->made_of + j * K, K);
            entry -= inner(row, other, padded(j));
            if (j < i)
                row[j] = entry * other[j];
            else /* its reciprocal; entries of `row` from here on are still 0 in the sums above */
                row[i] = x->place[i] < 0 ? 1.0 : 1.0 / sqrt(entry);
        }
        double diagonal = row[i];
        row[i] = 0.0;
        x->y[i] = (x->y[i] - inner(row, x->y, padded(i))) * diagonal;
        row[i] = diagonal;
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        const double *row = x->triangle + i * I;
        double found = x->y[i] *= row[i];
        for (int64_t j = 0; j < i; j++) x->y[j] -= found * row[j];
    }
}

/* The basis for the rows loaded and w */
PART void find_basis(Sample *x) {
    for (int64_t k = 0; k < x->outputs; k++) {
        if (x->w[k] > 0 && x->w[k] < LEAST_SLOPE) x->w[k] = LEAST_SLOPE;
        x->root[k] = x->w[k] > 0 ? power_of_two(x->w[k], 2) : 0.0;
    }
    rebase(x);
}

/* x, s and t from w, g_z, g_u, g_v and the basis */
PART void solve_in_basis(Sample *x) {
    const int64_t n = x->equations, K = x->outputs, I = x->rows, length = K + I;
    /* h = g_z − Tᵀg_z[basis], in t */
    memcpy(x->t, x->g_z, K * sizeof(double));
    for (int64_t i = 0; i < n; i++)
        if (x->place[i] >= 0) add_to(x->t, -x->g_z[x->place[i]], x->table + i * length, K);
    for (int64_t i = 0; i < n; i++)
        if (x->place[i] >= 0) x->t[x->place[i]] = 0.0;
    for (int64_t k = 0; k < K; k++) {
        x->root[k] = sqrt(x->w[k]);
        x->x[k] = x->root[k] * x->t[k];
    }
    for (int64_t i = 0; i < n; i++) {
        const double *row = x->table + i * length;
        double *scaled = x->made_of + i * K, d = x->place[i] < 0 ? 1.0 : 1.0 / x->root[x->place[i]];
        for (int64_t k = 0; k < K; k++) scaled[k] = row[k] * x->root[k] * d;
        x->d[i] = d;
        x->moved[i] = inner(row + K, x->g_v, I);
        x->y[i] = inner(scaled, x->x, K) + d * (inner(row, x->g_u, K) + x->moved[i]);
    }
    solve_scaled(x);
    memset(x->s, 0, I * sizeof(double));
    for (int64_t i = 0; i < n; i++) {
        if (x->place[i] < 0) continue;
        const double *row = x->table + i * length, found = x->d[i] * x->y[i];
        add_to(x->s, x->g_z[x->place[i]] + found, row + K, I);
        add_to(x->t, -found, row, K);
    }
    for (int64_t k = 0; k < K; k++) x->x[k] = x->g_u[k] + x->w[k] * x->t[k];
    for (int64_t i = 0; i < n; i++)
        if (x->place[i] >= 0) x->x[x->place[i]] = 0.0;
    /* At the basis from A x = −g_v: there g_u + w∘t would cancel. */
    for (int64_t i = 0; i < n; i++) x->y[i] = -x->moved[i] - inner(x->table + i * length, x->x, K);
    for (int64_t i = 0; i < n; i++)
        if (x->place[i] >= 0) x->x[x->place[i]] = x->y[i];
}

/* to ← R from, or Rᵀ from; without R a copy */
INLINE void measure_by(const double *R, int adjoint, const double *from, double *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        to[i] = R ? 0.0 : from[i];
        for (int64_t j = 0; R && j < n; j++) to[i] += R[adjoint ? j * n + i : i * n + j] * from[j];
    }
}

/* g_v += A g_u of outputs with slope 0, of which T then knows nothing */
PART void ask_still(Sample *x) {
    for (int64_t k = 0; k < x->outputs; k++)
        for (int64_t i = 0; x->w[k] == 0.0 && i < x->equations; i++) {
            x->table[i * (x->outputs + x->rows) + k] = 0.0;
            if (x->g_u[k] != 0.0 && x->given[i]) x->g_v[i] += x->given[i][k] * x->g_u[k];
        }
}

/* t = g_z − Aᵀs of outputs with slope 0, with another s */
PART void answer_still(Sample *x) {
    for (int64_t k = 0; k < x->outputs; k++)
        if (x->w[k] == 0.0) x->t[k] = x->g_z[k];
    for (int64_t i = 0; i < x->equations; i++)
        for (int64_t k = 0; x->given[i] && k < x->columns; k++)
            if (x->w[k] == 0.0) x->t[k] -= x->given[i][k] * x->s[i];
}

/* (R F)ᵀ as the rows of `fold`: F makes lost rows of those with a pivot. See `_folded` of
 * systems/stable.py */
PART void load_fold(Sample *x, const double *metric, Sample *fold) {
    const int64_t n = x->equations, length = x->outputs + x->rows;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < n; i++) {
            const double *E = x->table + i * length + x->outputs;
            x->d[i] = x->place[i] == NO_PIVOT ? -E[j] / E[i] : (double)(i == j);
        }
        measure_by(metric, 0, x->d, x->y, n);
        load_row(fold, j, x->place[j] < 0 ? NULL : x->y, n);
        fold->w[j] = 1.0;
    }
    find_basis(fold);
}

/* x, s and t from w, g_z, g_u, g_v and the rows loaded, with the least s where rows are lost; false
 * where there is no memory for that. */
PART int solve_stably(Sample *x, const double *metric) {
    const int64_t n = x->equations;
    Sample fold;
    void *memory = NULL;
    find_basis(x);
    if (x->lost) {
        memory = make_sample(&fold, n, n);
        if (!memory) return 0;
        load_fold(x, metric, &fold);
        ask_still(x);
        measure_by(metric, 0, x->g_v, fold.g_z, n);
        solve_in_basis(&fold);
        memcpy(x->g_v, fold.s, n * sizeof(double));
    }
    solve_in_basis(x);
    if (x->lost) {
        memset(fold.g_z, 0, n * sizeof(double));
        memcpy(fold.g_v, x->s, n * sizeof(double));
        solve_in_basis(&fold);
        measure_by(metric, 1, fold.x, x->s, n);
        for (int64_t i = 0; i < n; i++) x->s[i] = -x->s[i];
        answer_still(x);
    }
    free(memory);
    return 1;
}

#endif
