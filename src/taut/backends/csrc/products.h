/* Samples in and out of lanes, and the products A x and Aᵀx. */
#ifndef TAUT_PRODUCTS_H
#define TAUT_PRODUCTS_H

#include <string.h>

#include "calls.h"
#include "lanes.h"

INLINE double number(const void *x, int64_t i, int64_t single) {
    return single ? ((const float *)x)[i] : ((const double *)x)[i];
}

INLINE void put(void *x, int64_t i, int64_t single, double value) {
    if (single)
        ((float *)x)[i] = (float)value;
    else
        ((double *)x)[i] = value;
}

INLINE int64_t triangle(int64_t i) { return i * (i + 1) / 2; }

/* All lanes of a block are real samples: the last one is repeated. */
INLINE int64_t sample(int64_t first, int lane, int64_t samples) {
    return first + lane < samples ? first + lane : samples - 1;
}

typedef float floats __attribute__((vector_size(4 * LANES)));

INLINE lanes load(const void *x, int64_t i, int64_t single) {
    lanes wide;
    floats narrow;
    if (!single) return *(lanes *)memcpy(&wide, (const double *)x + i, sizeof wide);
    memcpy(&narrow, (const float *)x + i, sizeof narrow);
    return __builtin_convertvector(narrow, lanes);
}

INLINE void store(void *x, int64_t i, int64_t single, lanes value) {
    floats narrow = __builtin_convertvector(value, floats);
    if (single)
        memcpy((float *)x + i, &narrow, sizeof narrow);
    else
        memcpy((double *)x + i, &value, sizeof value);
}

PART void read_outputs(const Plan *p, lanes *to, const void *x, int64_t first, int64_t samples,
                       int64_t single) {
    const int64_t whole = p->given / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        for (int l = 0; l < LANES; l++)
            to[k + l] = load(x, sample(first, l, samples) * p->given + k, single);
        transpose(to + k);
    }
    for (int64_t k = whole; k < p->given; k++)
        for (int l = 0; l < LANES; l++)
            to[k][l] = number(x, sample(first, l, samples) * p->given + k, single);
    for (int64_t k = p->given; k < p->outputs; k++) to[k] = all(0.0);
}

/* The samples of the lanes in `which` */
PART void write_outputs_of(const Plan *p, const lanes *from, void *x, int64_t first, int64_t samples,
                           int64_t single, mask which) {
    const int64_t whole = p->given / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        lanes block[LANES];
        for (int l = 0; l < LANES; l++) block[l] = from[k + l];
        transpose(block);
        for (int l = 0; l < LANES && first + l < samples; l++)
            if (which[l]) store(x, (first + l) * p->given + k, single, block[l]);
    }
    for (int64_t k = whole; k < p->given; k++)
        for (int l = 0; l < LANES && first + l < samples; l++)
            if (which[l]) put(x, (first + l) * p->given + k, single, from[k][l]);
}

/* The entries of A's rows, of each sample at `at` numbers from x */
INLINE void read_rows_at(const Plan *p, lanes *to, const void *x, const int64_t *at,
                         int64_t single) {
    for (int64_t i = 0; i < p->rows; i++) {
        to[i] = all(0.0);
        if (p->order[i] >= 0)
            for (int l = 0; l < LANES; l++) to[i][l] = number(x, at[l] + p->order[i], single);
    }
}

INLINE void read_rows(const Plan *p, lanes *to, const void *x, int64_t stride, int64_t first,
                      int64_t samples, int64_t single) {
    int64_t at[LANES];
    for (int l = 0; l < LANES; l++) at[l] = sample(first, l, samples) * stride;
    read_rows_at(p, to, x, at, single);
}

INLINE void write_outputs(const Plan *p, const lanes *from, void *x, int64_t first, int64_t samples,
                          int64_t single) {
    write_outputs_of(p, from, x, first, samples, single, (mask){0} == 0);
}

INLINE void write_rows_of(const Plan *p, const lanes *from, void *x, int64_t first, int64_t samples,
                          int64_t single, mask which) {
    for (int64_t i = 0; i < p->rows; i++)
        for (int l = 0; p->order[i] >= 0 && l < LANES && first + l < samples; l++)
            if (which[l])
                put(x, (first + l) * p->constraints + p->order[i], single,
                    i < p->kept ? from[i][l] : 0.0);
}

INLINE void write_rows(const Plan *p, const lanes *from, void *x, int64_t first, int64_t samples,
                       int64_t single) {
    write_rows_of(p, from, x, first, samples, single, (mask){0} == 0);
}

/* Only outputs whose σ bends count where it is asked how far u moves. */
INLINE lanes farther_at(const Plan *p, int64_t k, lanes far, lanes by) {
    return p->bends && !p->bends[k] ? far : farther(far, absolute(by));
}

INLINE Output activate_output(const Plan *p, int64_t k, lanes u) {
    if (p->plain[k]) return activate(p->kind[k], u);
    Output out = activate(p->kind[k], u / p->temperature[k]);
    out.z = p->shift[k] + p->scale[k] * out.z;
    out.z = at_most(at_least(out.z, all(p->lower[k])), all(p->upper[k]));
    out.slope *= p->scale[k] / p->temperature[k];
    return out;
}

/* The ends of the range of output k */
INLINE double lowest_end(const Plan *p, int64_t k) {
    return p->kind[k] == EXP && p->scale[k] > 0 ? p->shift[k] : p->lower[k];
}
INLINE double highest_end(const Plan *p, int64_t k) {
    return p->kind[k] == EXP && p->scale[k] < 0 ? p->shift[k] : p->upper[k];
}

/* z at u = ±inf: the end exactly, which shift + scale·1 misses by rounding */
PART void set_ends(const Plan *p, const lanes *u, lanes *z) {
    for (int64_t k = 0; k < p->given; k++) {
        if (p->plain[k] || p->kind[k] == LINEAR) continue;
        z[k] = choose(u[k] == -INFINITY, all(lowest_end(p, k)), z[k]);
        z[k] = choose(u[k] == INFINITY, all(highest_end(p, k)), z[k]);
    }
}

/* Where a row, of sides `lower` and `upper`, is at or beyond an end of what it can come to with outputs
 * between `low` and `high`: see held.py */
PART mask meets_end(const Plan *p, const lanes *low, const lanes *high, const lanes *lower,
                    const lanes *upper, double slack) {
    mask found = all(0.0) != all(0.0);
    for (int64_t i = 0; i < p->rows; i++) {
        lanes least = all(0.0), most = all(0.0), least_terms = all(0.0), most_terms = all(0.0);
        int64_t some = 0;
        if (p->order[i] < 0) continue;
        const int64_t first = p->row_start ? p->row_start[i] : 0;
        const int64_t last = p->row_start ? p->row_start[i + 1] : p->given;
        for (int64_t e = first; e < last; e++) {
            const int64_t k = p->row_start ? p->row_output[e] : e;
            const double a = p->a[i * p->outputs + k];
            if (a == 0.0) continue;
            const lanes down = a * (a > 0.0 ? low : high)[k], up = a * (a > 0.0 ? high : low)[k];
            least += down;
            least_terms += absolute(down);
            most += up;
            most_terms += absolute(up);
            some++;
        }
        if (!some) continue;
        found |= upper[i] <= least + slack * least_terms;
        found |= lower[i] >= most - slack * most_terms;
    }
    return found;
}

/* out[0 … TILE) = (Aᵀx)_k, from output k on; x of the rows kept */
INLINE void adjoint(const Plan *p, const lanes *x, int64_t k, lanes *out) {
    if (p->row_start) {
        for (int t = 0; t < TILE; t++) {
            lanes sum = all(0.0);
            for (int64_t e = p->output_start[k + t]; e < p->output_start[k + t + 1]; e++)
                sum += p->output_value[e] * x[p->output_row[e]];
            out[t] = sum;
        }
        return;
    }
    /* Two sums for each, or every addition would wait for the one before. */
    lanes even[TILE] = {all(0.0), all(0.0), all(0.0), all(0.0)}, odd[TILE];
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) odd[t] = all(0.0);
    for (int64_t i = 0; i < p->kept; i += 2) {
        const double *a = p->a + i * p->outputs + k;
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) {
            even[t] += a[t] * x[i];
            odd[t] += a[p->outputs + t] * x[i + 1];
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) out[t] = even[t] + odd[t];
}

/* out[0 … TILE) = (A x)_i from row i on, or |A|x */
INLINE void apply(const Plan *p, const lanes *x, int64_t i, int sign, lanes *out) {
    if (p->row_start) {
        for (int t = 0; t < TILE; t++) {
            lanes even = all(0.0), odd = all(0.0);
            int64_t e = p->row_start[i + t], end = p->row_start[i + t + 1];
            for (; e + 1 < end; e += 2) {
                double one = p->row_value[e], two = p->row_value[e + 1];
                even += (sign ? one : fabs(one)) * x[p->row_output[e]];
                odd += (sign ? two : fabs(two)) * x[p->row_output[e + 1]];
            }
            if (e < end)
                even += (sign ? p->row_value[e] : fabs(p->row_value[e])) * x[p->row_output[e]];
            out[t] = even + odd;
        }
        return;
    }
    lanes even[TILE] = {all(0.0), all(0.0), all(0.0), all(0.0)}, odd[TILE];
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) odd[t] = all(0.0);
    const double *a = (sign ? p->a : p->absolute) + i * p->outputs;
    for (int64_t k = 0; k < p->outputs; k += 2) {
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) {
            even[t] += a[t * p->outputs + k] * x[k];
            odd[t] += a[t * p->outputs + k + 1] * x[k + 1];
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TILE; t++) out[t] = even[t] + odd[t];
}

/* The largest of |g| + w∘|A|ᵀ|s|: what g − w∘Aᵀs is summed from */
INLINE lanes largest_sum(const Plan *p, const lanes *g, const lanes *w, const lanes *s) {
    lanes most = all(0.0);
    for (int64_t k = 0; k < p->given; k++) {
        lanes sum = all(0.0);
        for (int64_t i = 0; i < p->kept; i++)
            sum += p->absolute[i * p->outputs + k] * absolute(s[i]);
        most = larger(most, absolute(g[k]) + w[k] * sum);
    }
    return most;
}

#endif
