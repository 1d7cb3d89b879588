/* What kernel.py and plan.py hand over, in the order of their fields. */
#ifndef TAUT_CALLS_H
#define TAUT_CALLS_H

#include <stdint.h>

#define TILE 4

typedef struct {
    int64_t outputs;      /* K, filled up to a multiple of TILE */
    int64_t given;        /* K */
    int64_t rows;         /* of A, reordered and filled up to a multiple of TILE */
    int64_t kept;         /* those that Newton works with, which come first */
    int64_t disjoint;     /* and of those the ones, again first, that share no output */
    int64_t constraints;  /* I */
    int64_t positive;     /* is no a·z negative? */
    const int64_t *order; /* the row of A that each is, or −1 for filling */
    const double *a, *absolute; /* rows × outputs, and without signs */
    const double *sizes;  /* Σ|a| of each row */
    /* Where A is mostly zeros, its non-zeros by row, and by output for the rows kept; and the
     * products of two in one output, by entry of the lower triangle of A diag(w) Aᵀ. */
    const int64_t *row_start, *row_output;
    const double *row_value;
    const int64_t *output_start, *output_row;
    const double *output_value;
    const int64_t *entry_start, *entry_output;
    const double *entry_value;
    const double *flat;    /* kept × kept: the inverse of A Aᵀ */
    const double *inverse; /* the same of A diag(w) Aᵀ where σ is a line, or NULL */
    const int8_t *kind;
    const int8_t *plain; /* without shift, scale and temperature */
    const double *shift, *scale, *temperature, *lower, *upper;
} Plan;

typedef struct {
    const Plan *plan;
    const void *v, *b, *start; /* start may be NULL: 0 */
    void *multipliers, *u, *z, *residual;
    int64_t *iterations;
    int8_t *solved;
    int64_t samples, single, b_stride, limit; /* single: float32 in and out */
    int64_t next, unsolved; /* the first sample nobody works on; how many are not solved, at first all */
    double target, share, huge;
} Solve;

typedef struct {
    const Plan *plan;
    const void *u, *g_multipliers, *g_u, *g_z; /* gradients may be NULL */
    const int64_t *status;
    void *dv, *db;
    int8_t *solved;
    int64_t samples, single, next, unsolved;
} Backward;

typedef struct {
    const Plan *plan;
    const void *v, *b, *y, *u, *multipliers;
    void *loss;
    int64_t samples, single, b_stride, next, unsolved;
} Loss;

#endif
