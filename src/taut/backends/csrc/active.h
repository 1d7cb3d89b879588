/* C_F diag(w) C_Fᵀ in the active rows F of each sample, and its solutions. */
#ifndef TAUT_ACTIVE_H
#define TAUT_ACTIVE_H

#include "euclid.h"

/* The matrix in the rows that are active in any lane, which `some` lists */
PART void form_union(const Plan *p, Sides *x, const lanes *w, int64_t count) {
    const int64_t K = p->outputs;
    if (p->row_start) {
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j <= i; j++) {
                const int64_t e = triangle(x->some[i]) + x->some[j];
                lanes sum = all(0.0);
                for (int64_t k = p->entry_start[e]; k < p->entry_start[e + 1]; k++)
                    sum += p->entry_value[k] * w[p->entry_output[k]];
                x->gram[triangle(i) + j] = sum;
            }
        return;
    }
    for (int64_t i = 0; i < count; i += TILE)
        for (int64_t j = 0; j <= i; j += TILE) {
            const double *left[TILE], *right[TILE];
            lanes sums[TILE][TILE];
            for (int t = 0; t < TILE; t++) {
                left[t] = p->a + x->some[i + t < count ? i + t : count - 1] * K;
                right[t] = p->a + x->some[j + t < count ? j + t : count - 1] * K;
            }
            form_tile(left, right, w, K, sums);
            for (int s = 0; s < TILE && i + s < count; s++)
                for (int t = 0; t < TILE && j + t <= i + s; t++)
                    x->gram[triangle(i + s) + j + t] = sums[s][t];
        }
}

/* The matrix of each sample, in `own`; returns its size. Active are the rows with `orthant` ≠ 0. */
PART int64_t form_active(const Plan *p, Sides *x, const lanes *w) {
    int64_t count = 0;
    for (int64_t i = 0; i < p->rows; i++) {
        x->place[i] = count;
        if (any(x->orthant[i] != 0.0)) x->some[count++] = i;
    }
    form_union(p, x, w, count);
    const int64_t n = list_active(x->orthant, 0, p->rows, x->index);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j <= i; j++) {
            lanes entry = all(0.0);
            for (int l = 0; l < LANES; l++) {
                int64_t row = x->index[i * LANES + l], column = x->index[j * LANES + l];
                entry[l] = row < 0 ? i == j : x->gram[triangle(x->place[row]) + x->place[column]][l];
            }
            x->own[triangle(i) + j] = entry;
        }
    return n;
}

/* step ← H⁻¹s in the rows with `orthant` ≠ 0; s is 0 in the others. Returns the size of the system
 * that was factorised. */
PART int64_t solve_active(const Plan *p, const Line *line, Sides *x, const Rules *r, const lanes *s,
                          mask *dependent) {
    if (line) return solve_line(line, x, r, s, dependent);
    const int64_t n = form_active(p, x, x->w);
    factorise_own(n, x->own, x->diagonal, r->dependent, dependent);
    gather_rows(x->index, n, s, x->x);
    solve_own(n, x->own, x->diagonal, x->x);
    scatter_rows(x->index, n, x->x, x->step, p->rows);
    return n;
}

#endif
