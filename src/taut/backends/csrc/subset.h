/* Systems in the active rows of each sample alone. Every lane has a list of its own, filled up with
 * −1: which rows are active in other lanes changes no bit of it. */
#ifndef TAUT_SUBSET_H
#define TAUT_SUBSET_H

#include "factor.h"

/* Lists the rows from `first` on whose `which` is not 0, less `first`; returns the length of the
 * longest list, filled up to a multiple of TILE. */
PART int64_t list_active(const lanes *which, int64_t first, int64_t count, int64_t *index) {
    int64_t length[LANES] = {0}, longest = 0;
    for (int64_t i = 0; i < count; i++)
        for (int l = 0; l < LANES; l++)
            if (which[first + i][l] != 0.0) index[length[l]++ * LANES + l] = i;
    for (int l = 0; l < LANES; l++) longest = length[l] > longest ? length[l] : longest;
    longest = (longest + TILE - 1) / TILE * TILE;
    for (int l = 0; l < LANES; l++)
        for (int64_t i = length[l]; i < longest; i++) index[i * LANES + l] = -1;
    return longest;
}

/* x ← the listed entries of `from`, whose first row is number 0; 0 in the filling */
INLINE void gather_rows(const int64_t *index, int64_t n, const lanes *from, lanes *x) {
    for (int64_t i = 0; i < n; i++)
        for (int l = 0; l < LANES; l++) {
            int64_t row = index[i * LANES + l];
            x[i][l] = row < 0 ? 0.0 : from[row][l];
        }
}

/* The other way; rows that are not listed become 0. */
INLINE void scatter_rows(const int64_t *index, int64_t n, const lanes *x, lanes *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = all(0.0);
    for (int64_t i = 0; i < n; i++)
        for (int l = 0; l < LANES; l++)
            if (index[i * LANES + l] >= 0) to[index[i * LANES + l]][l] = x[i][l];
}

/* The listed rows and columns of a symmetric matrix that all samples share, count × count; those of
 * the identity in the filling */
PART void gather_shared(const int64_t *index, int64_t n, const double *q, int64_t count, lanes *own) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++) {
            lanes entry = all(0.0);
            for (int l = 0; l < LANES; l++) {
                int64_t row = index[i * LANES + l];
                entry[l] = row < 0 ? i == j : q[row * count + index[j * LANES + l]];
            }
            own[triangle(i) + j] = entry;
        }
}

/* Cholesky's factor in place, n a multiple of TILE; its diagonal stays, and the reciprocals of
 * the factor's go to `diagonal`. A row that depends on those before it stands still: its reciprocal is 0, and so is its part of every
 * solution. `dependent` tells where there is one. */
PART void factorise_own(int64_t n, lanes *own, lanes *diagonal, double least, mask *dependent) {
    mask found = all(0.0) != all(0.0);
    for (int64_t i = 0; i < n; i++) diagonal[i] = own[triangle(i) + i]; /* to compare pivots with */
    for (int64_t j = 0; j < n; j += TILE)
        for (int64_t i = j; i < n; i += TILE) {
            lanes sums[TILE][TILE], *row[TILE], *column[TILE];
            sum_tile(own, i, j, row, column, sums);
            for (int s = 0; s < TILE; s++)
                for (int t = 0; t < TILE && j + t <= i + s; t++) {
                    lanes x = row[s][j + t] - sums[s][t];
                    for (int k = 0; k < t; k++) x -= row[s][j + k] * column[t][j + k];
                    if (i + s > j + t) {
                        row[s][j + t] = x * diagonal[j + t];
                        continue;
                    }
                    mask good = (x > least * diagonal[i + s]) & (x > 0x1p-900);
                    row[s][j + t] = diagonal[i + s];
                    found |= ~good;
                    x = choose(good, x, all(1.0));
                    for (int l = 0; l < LANES; l++) x[l] = 1.0 / sqrt(x[l]);
                    diagonal[i + s] = choose(good, x, all(0.0));
                }
        }
    *dependent = found;
}

/* x ← H⁻¹x by the factor */
PART void solve_own(int64_t n, const lanes *own, const lanes *diagonal, lanes *x) {
    substitute(0, n, own, diagonal, x);
}

#endif
