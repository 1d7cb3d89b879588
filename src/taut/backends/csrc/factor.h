/* Newton's linear system A diag(w) Aᵀ x = r: formed, factorised and solved in every lane. */
#ifndef TAUT_FACTOR_H
#define TAUT_FACTOR_H

#include "products.h"

/* A tile is summed so many columns at a time: AVX2 has 16 registers, too few for 16 sums. (So has
 * SSE2, where two columns at a time are no faster; NEON has 32.) */
#define COLUMNS (LANES == 4 ? TILE / 2 : TILE)

/* Entries of A diag(w) Aᵀ, TILE rows with TILE others: each sum goes by k alone, so that none depends
 * on its neighbours. */
INLINE void form_tile(const double *const *left, const double *const *right, const lanes *w, int64_t K,
                      lanes sums[TILE][TILE]) {
#pragma GCC unroll 2
    for (int c = 0; c < TILE; c += COLUMNS) {
        lanes sum[TILE][COLUMNS];
#pragma GCC unroll 4
        for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
            for (int t = 0; t < COLUMNS; t++) sum[s][t] = all(0.0);
        for (int64_t k = 0; k < K; k++) {
            lanes weighted[COLUMNS];
#pragma GCC unroll 4
            for (int t = 0; t < COLUMNS; t++) weighted[t] = right[c + t][k] * w[k];
#pragma GCC unroll 4
            for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
                for (int t = 0; t < COLUMNS; t++) sum[s][t] += left[s][k] * weighted[t];
        }
#pragma GCC unroll 4
        for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
            for (int t = 0; t < COLUMNS; t++) sums[s][c + t] = sum[s][t];
    }
}

PART void form_gram(const Plan *p, const lanes *w, lanes *gram) {
    const int64_t n = p->kept, K = p->outputs;
    if (p->row_start) {
        for (int64_t e = 0; e < triangle(n); e++) {
            lanes sum = all(0.0);
            for (int64_t j = p->entry_start[e]; j < p->entry_start[e + 1]; j++)
                sum += p->entry_value[j] * w[p->entry_output[j]];
            gram[e] = sum;
        }
        return;
    }
    for (int64_t i = 0; i < n; i += TILE)
        for (int64_t j = 0; j <= i; j += TILE) {
            const double *left[TILE], *right[TILE];
            lanes sums[TILE][TILE];
#pragma GCC unroll 4
            for (int t = 0; t < TILE; t++) {
                left[t] = p->a + (i + t) * K;
                right[t] = p->a + (j + t) * K;
            }
            form_tile(left, right, w, K, sums);
#pragma GCC unroll 4
            for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
                for (int t = 0; t < TILE; t++)
                    if (j + t <= i + s) gram[triangle(i + s) + j + t] = sums[s][t];
        }
}

/* The rows of a triangle from i on and from j on, and their products before column j */
INLINE void sum_tile(lanes *gram, int64_t i, int64_t j, lanes **row, lanes **column,
                     lanes sums[TILE][TILE]) {
#pragma GCC unroll 4
    for (int s = 0; s < TILE; s++) {
        row[s] = gram + triangle(i + s);
        column[s] = gram + triangle(j + s);
    }
#pragma GCC unroll 2
    for (int c = 0; c < TILE; c += COLUMNS) {
        lanes sum[TILE][COLUMNS];
#pragma GCC unroll 4
        for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
            for (int t = 0; t < COLUMNS; t++) sum[s][t] = all(0.0);
        for (int64_t k = 0; k < j; k++)
#pragma GCC unroll 4
            for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
                for (int t = 0; t < COLUMNS; t++) sum[s][t] += row[s][k] * column[c + t][k];
#pragma GCC unroll 4
        for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
            for (int t = 0; t < COLUMNS; t++) sums[s][c + t] = sum[s][t];
    }
}

/* Cholesky's factor in place, without its diagonal, whose reciprocals go to `diagonal`. `which`
 * becomes false where A diag(w) Aᵀ is singular to rounding. Rows that share no output need no
 * elimination among themselves. */
PART void factorise(const Plan *p, lanes *gram, lanes *diagonal, double least, mask *which) {
    const int64_t n = p->kept, d = p->disjoint;
    mask fine = *which;
    for (int64_t i = 0; i < n; i++) {
        lanes *entry = &gram[triangle(i) + i];
        if (p->order[i] < 0) *entry = all(1.0);
        diagonal[i] = *entry; /* to compare pivots with */
    }
    for (int64_t j = 0; j < d; j++) {
        lanes pivot = gram[triangle(j) + j];
        fine &= pivot > 0x1p-900;
        for (int l = 0; l < LANES; l++) diagonal[j][l] = 1.0 / sqrt(pivot[l]);
    }
    for (int64_t i = d; i < n; i++)
        for (int64_t j = 0; j < d; j++) gram[triangle(i) + j] *= diagonal[j];
    for (int64_t j = d; j < n; j += TILE)
        for (int64_t i = j; i < n; i += TILE) {
            lanes sums[TILE][TILE], *row[TILE], *column[TILE];
            sum_tile(gram, i, j, row, column, sums);
#pragma GCC unroll 4
            for (int s = 0; s < TILE; s++)
#pragma GCC unroll 4
                for (int t = 0; t < TILE; t++) {
                    if (j + t > i + s) continue;
                    lanes x = row[s][j + t] - sums[s][t];
#pragma GCC unroll 4
                    for (int k = 0; k < t; k++) x -= row[s][j + k] * column[t][j + k];
                    if (i + s > j + t) {
                        row[s][j + t] = x * diagonal[j + t];
                        continue;
                    }
                    fine &= (x > least * diagonal[i + s]) & (x > 0x1p-900);
                    for (int l = 0; l < LANES; l++) diagonal[i + s][l] = 1.0 / sqrt(x[l]);
                }
        }
    *which = fine;
}

/* x ← matrix·x for a matrix that all samples share, kept × kept */
PART void multiply(const Plan *p, const double *matrix, lanes *x, lanes *room) {
    const int64_t n = p->kept;
    memcpy(room, x, n * sizeof *x);
    for (int64_t i = 0; i < n; i += TILE) {
        lanes sum[TILE] = {all(0.0), all(0.0), all(0.0), all(0.0)};
        const int count = i + TILE <= n ? TILE : (int)(n - i);
        for (int64_t j = 0; j < n && count == TILE; j++)
#pragma GCC unroll 4
            for (int t = 0; t < TILE; t++) sum[t] += matrix[(i + t) * n + j] * room[j];
        for (int t = 0; t < count && count < TILE; t++)
            for (int64_t j = 0; j < n; j++) sum[t] += matrix[(i + t) * n + j] * room[j];
        for (int t = 0; t < TILE && i + t < n; t++) x[i + t] = sum[t];
    }
}

/* Forward and back through rows d to n of a factor; the first d of x are divided already */
INLINE void substitute(int64_t d, int64_t n, const lanes *factor, const lanes *diagonal, lanes *x) {
    for (int64_t i = d; i < n; i++) {
        const lanes *row = factor + triangle(i);
        lanes even = all(0.0), odd = all(0.0);
        int64_t k = 0;
        for (; k + 1 < i; k += 2) {
            even += row[k] * x[k];
            odd += row[k + 1] * x[k + 1];
        }
        if (k < i) even += row[k] * x[k];
        x[i] = (x[i] - (even + odd)) * diagonal[i];
    }
    for (int64_t i = n - 1; i >= d; i--) {
        const lanes *row = factor + triangle(i);
        lanes found = x[i] *= diagonal[i];
        for (int64_t k = 0; k < i; k++) x[k] -= row[k] * found;
    }
}

/* x ← (A diag(w) Aᵀ)⁻¹ x, by the factor or by the inverse of all */
PART void solve_gram(const Plan *p, const lanes *gram, const lanes *diagonal, lanes *x,
                     lanes *room) {
    const int64_t n = p->kept, d = p->disjoint;
    if (p->inverse) {
        multiply(p, p->inverse, x, room);
        return;
    }
    for (int64_t i = 0; i < d; i++) x[i] *= diagonal[i];
    substitute(d, n, gram, diagonal, x);
    for (int64_t i = 0; i < d; i++) x[i] *= diagonal[i];
}

#endif
