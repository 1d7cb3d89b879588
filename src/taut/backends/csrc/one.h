/* Inequalities, one sample after the other, each with rows of its own if it has any: what solvers/
 * sides.py is in torch. For the few samples that blocks leave open; there is nothing else to do
 * meanwhile, and torch would take a hundred calls for each step. */
#ifndef TAUT_ONE_H
#define TAUT_ONE_H

#include "sides.h"

#define SRLU 4 /* a kind that only this file knows: u times the mean of two numbers */

/* Where a sample is: z = clip(σ(u)), w = dz/du, r = C z */
typedef struct {
    double *nu, *r; /* rows */
    double *u, *z, *w; /* outputs */
} Spot;

/* A sample, and room to work in */
typedef struct {
    const One *of;
    const Plan *p;
    int64_t rows, outputs;
    const double *c, *v, *lower, *upper, *floor, *ceiling, *lowest, *highest;
    double unit;
    double *turned; /* c by output */
    Spot here, there, tried;
    double *s, *size, *fair, *rough, *orthant, *step, *change, *more; /* rows */
    double *y, *blur, *shift;                                         /* outputs */
    double *packed, *gram, *factor, *diagonal, *own, *x;              /* the system of active rows */
    int64_t *index;
} Alone;

/* Cuts `count` numbers from `*at`; with a NULL base it only counts. */
INLINE double *cut_room(double *base, int64_t *at, int64_t count) {
    double *found = base ? base + *at : NULL;
    *at += count;
    return found;
}

static int64_t lay_out_alone(Alone *x, double *base) {
    const int64_t M = x->rows, K = x->outputs;
    double **of_rows[] = {&x->here.nu, &x->here.r, &x->there.nu, &x->there.r, &x->tried.nu, &x->tried.r,
                          &x->s, &x->size, &x->fair, &x->rough, &x->orthant, &x->step, &x->change,
                          &x->more, &x->diagonal, &x->own, &x->x};
    double **of_outputs[] = {&x->here.u, &x->here.z, &x->here.w, &x->there.u, &x->there.z, &x->there.w,
                             &x->tried.u, &x->tried.z, &x->tried.w, &x->y, &x->blur, &x->shift};
    double **of_both[] = {&x->turned, &x->packed}, **squares[] = {&x->gram, &x->factor};
    int64_t at = 0;
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++) *of_rows[i] = cut_room(base, &at, M);
    for (size_t i = 0; i < sizeof of_outputs / sizeof *of_outputs; i++)
        *of_outputs[i] = cut_room(base, &at, K);
    for (int i = 0; i < 2; i++) {
        *of_both[i] = cut_room(base, &at, M * K);
        *squares[i] = cut_room(base, &at, M * M);
    }
    x->index = (int64_t *)cut_room(base, &at, M);
    return at;
}

static void *make_alone(const One *of, Alone *x) {
    *x = (Alone){.of = of, .p = of->plan, .rows = of->rows, .outputs = of->outputs};
    double *memory = malloc((lay_out_alone(x, NULL) + 1) * sizeof *memory);
    if (memory) lay_out_alone(x, memory);
    return memory;
}

INLINE void read_matrix(Alone *x, const double *c) {
    x->c = c;
    for (int64_t i = 0; i < x->rows; i++)
        for (int64_t k = 0; k < x->outputs; k++) x->turned[k * x->rows + i] = c[i * x->outputs + k];
}

/* Sample n of the call */
PART void read_alone(const One *of, Alone *x, int64_t n) {
    const int64_t M = x->rows, K = x->outputs;
    read_matrix(x, of->matrix + n * of->stride);
    x->v = of->v + n * K;
    x->lower = of->lower + n * M;
    x->upper = of->upper + n * M;
    x->floor = of->floor ? of->floor + n * K : NULL;
    x->ceiling = of->ceiling ? of->ceiling + n * K : NULL;
    x->lowest = of->lowest + n * K;
    x->highest = of->highest + n * K;
    x->unit = of->unit ? of->unit[n] : 0.0;
}

INLINE double size_of_one(double x) { return x < 0.0 ? -x : x; }
INLINE double least_of(double x, double y) { return y < x ? y : x; }
INLINE double most_of_two(double x, double y) { return y > x ? y : x; }

/* to ← C z, or |C|z */
PART void image_of(const Alone *x, const double *z, int sign, double *to) {
    const int64_t M = x->rows;
    for (int64_t i = 0; i < M; i++) to[i] = 0.0;
    for (int64_t k = 0; k < x->outputs; k++) {
        const double *c = x->turned + k * M, f = z[k];
        if (f == 0.0) continue;
        if (sign)
            for (int64_t i = 0; i < M; i++) to[i] += c[i] * f;
        else
            for (int64_t i = 0; i < M; i++) to[i] += size_of_one(c[i]) * f;
    }
}

/* to ← Cᵀν, or |C|ᵀ|ν| */
PART void pull_of(const Alone *x, const double *nu, int sign, double *to) {
    const int64_t K = x->outputs;
    for (int64_t k = 0; k < K; k++) to[k] = 0.0;
    for (int64_t i = 0; i < x->rows; i++) {
        const double *c = x->c + i * K, f = nu[i];
        if (f == 0.0) continue;
        if (sign)
            for (int64_t k = 0; k < K; k++) to[k] += c[k] * f;
        else
            for (int64_t k = 0; k < K; k++) to[k] += size_of_one(c[k] * f);
    }
}

/* σ(u) and its slope at output k */
INLINE Output curve_at(const Plan *p, int64_t k, double u) {
    if (p->kind[k] != SRLU) return activate_output(p, k, all(u));
    const double t = p->plain[k] ? u : u / p->temperature[k], a = p->first[k], b = p->second[k];
    Output p_of = activate(SIGMOID, all(0.5 * (a - b) * t * t));
    Output q_of = activate(SIGMOID, all(-0.5 * (a - b) * t * t));
    lanes mean = a * p_of.z + b * q_of.z;
    Output out = {t * mean, mean + (a - b) * t * (a - b) * t * p_of.z * q_of.z};
    if (p->plain[k]) return out;
    out.z = at_most(at_least(p->shift[k] + p->scale[k] * out.z, all(p->lower[k])), all(p->upper[k]));
    out.slope *= p->scale[k] / p->temperature[k];
    return out;
}

/* z within its bounds */
INLINE double clip_at(const Alone *x, int64_t k, double z) {
    if (!x->floor) return z;
    z = z < x->floor[k] ? x->floor[k] : z;
    return z > x->ceiling[k] ? x->ceiling[k] : z;
}

INLINE int is_free_at(const Alone *x, int64_t k, double z) {
    return !x->floor || (z > x->floor[k] && z < x->ceiling[k]);
}

/* u, z, w and C z at `to->nu` */
PART void visit(const Alone *x, Spot *to) {
    pull_of(x, to->nu, 1, to->u);
    for (int64_t k = 0; k < x->outputs; k++) {
        to->u[k] += x->v[k];
        Output out = curve_at(x->p, k, to->u[k]);
        to->w[k] = is_free_at(x, k, out.z[0]) ? out.slope[0] : 0.0;
        to->z[k] = clip_at(x, k, out.z[0]);
    }
    image_of(x, to->z, 1, to->r);
}

INLINE void copy_spot(const Alone *x, Spot *to, const Spot *from) {
    memcpy(to->nu, from->nu, x->rows * sizeof *to->nu);
    memcpy(to->r, from->r, x->rows * sizeof *to->r);
    memcpy(to->u, from->u, x->outputs * sizeof *to->u);
    memcpy(to->z, from->z, x->outputs * sizeof *to->z);
    memcpy(to->w, from->w, x->outputs * sizeof *to->w);
}

INLINE int is_finite_spot(const Alone *x, const Spot *at) {
    double total = 0.0;
    for (int64_t i = 0; i < x->rows; i++) total += size_of_one(at->r[i]);
    for (int64_t k = 0; k < x->outputs; k++) total += at->w[k];
    return total < INFINITY;
}

INLINE int is_equation(const Alone *x, int64_t i) { return x->lower[i] == x->upper[i]; }

INLINE int holds(const Alone *x, const Spot *at, int64_t i) {
    return at->nu[i] != 0.0 || is_equation(x, i);
}

/* The smallest subgradient of D: 0 where ν is optimal */
INLINE double slope_of_row(const Alone *x, double nu, double r, int64_t i) {
    const double low = x->lower[i], high = x->upper[i];
    if (nu > 0.0 || low == high) return r - low;
    if (nu < 0.0) return r - high;
    return r < low ? r - low : r > high ? r - high : r - r;
}

/* The side at which ν holds a row; 0 where it is inactive */
INLINE double side_of_row(const Alone *x, double nu, int64_t i) {
    return nu > 0.0 || is_equation(x, i) ? x->lower[i] : nu < 0.0 ? x->upper[i] : 0.0;
}

/* |s| over its size, the worst; NaN is infinite */
INLINE double worst_of(int64_t n, const double *s, const double *size) {
    double worst = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double ratio = size_of_one(s[i]) / size[i];
        if (!(ratio <= worst)) worst = ratio;
        if (ratio != ratio) return INFINITY;
    }
    return worst;
}

/* to ← |side| + |C||z| */
PART void sizes_of_rows(Alone *x, const Spot *at, double *to) {
    for (int64_t k = 0; k < x->outputs; k++) x->y[k] = size_of_one(at->z[k]);
    image_of(x, x->y, 0, to);
    for (int64_t i = 0; i < x->rows; i++) {
        to[i] += size_of_one(side_of_row(x, at->nu[i], i));
        if (to[i] < TINY) to[i] = TINY;
    }
}

/* `size` and `s` at `here`, without what is rounding of s; the worst ratios: `measure` of sides.py */
PART void measure_rows(Alone *x, double *plain, double *fair, double *rough) {
    const Spot *at = &x->here;
    const int64_t M = x->rows;
    sizes_of_rows(x, at, x->size);
    pull_of(x, at->nu, 0, x->shift);
    for (int64_t k = 0; k < x->outputs; k++) {
        x->y[k] = at->w[k] * size_of_one(x->v[k]);
        x->shift[k] *= at->w[k];
    }
    image_of(x, x->y, 0, x->fair);
    image_of(x, x->shift, 0, x->rough);
    for (int64_t i = 0; i < M; i++) {
        /* A size that has overflowed must not make every residual small. */
        x->fair[i] += x->size[i];
        if (!(x->fair[i] < INFINITY)) x->fair[i] = x->size[i];
        x->rough[i] += x->fair[i];
        if (!(x->rough[i] < INFINITY)) x->rough[i] = x->fair[i];
        x->s[i] = slope_of_row(x, at->nu[i], at->r[i], i);
    }
    *plain = worst_of(M, x->s, x->size);
    *fair = worst_of(M, x->s, x->fair);
    *rough = worst_of(M, x->s, x->rough);
    for (int64_t i = 0; i < M; i++) {
        const double one = 2.0 * EPS * x->rough[i], two = 1e-13 * x->fair[i];
        if (!holds(x, at, i) && size_of_one(x->s[i]) <= (one < two ? one : two)) x->s[i] = 0.0;
    }
}

/* Is every row within `most` of |side| + |C||z|? One whose multiplier is not 0, of its side. */
PART int keeps_rule(Alone *x, const Spot *at, double most) {
    for (int64_t k = 0; k < x->outputs; k++) x->y[k] = size_of_one(at->z[k]);
    image_of(x, x->y, 0, x->more);
    for (int64_t i = 0; i < x->rows; i++) {
        const double s = slope_of_row(x, at->nu[i], at->r[i], i);
        if (s == 0.0) continue;
        double side = s < 0.0 ? x->lower[i] : x->upper[i];
        if (at->nu[i] != 0.0 && !is_equation(x, i)) side = side_of_row(x, at->nu[i], i);
        double size = size_of_one(side) + x->more[i];
        if (size < 0x1p-1022) size = 0x1p-1022;
        if (!(size_of_one(s) <= most * size)) return 0;
    }
    return 1;
}

/* The upper triangle of Cholesky's factor, row by row, of the same of `gram`; 0 where there is none */
PART int factorise_one(int64_t n, const double *gram, const double *diagonal, double *factor) {
    memcpy(factor, gram, n * n * sizeof *gram);
    for (int64_t i = 0; i < n; i++) factor[i * n + i] = diagonal[i];
    for (int64_t j = 0; j < n; j++) {
        double *row = factor + j * n;
        if (!(row[j] > 0.0) || row[j] == INFINITY) return 0;
        const double root = sqrt(row[j]), by = 1.0 / root;
        row[j] = root;
        for (int64_t k = j + 1; k < n; k++) row[k] *= by;
        for (int64_t i = j + 1; i < n; i++) {
            const double f = row[i];
            if (f == 0.0) continue;
            for (int64_t k = i; k < n; k++) factor[i * n + k] -= f * row[k];
        }
    }
    return 1;
}

/* x ← H⁻¹x by the factor */
PART void solve_one(int64_t n, const double *factor, double *x) {
    for (int64_t j = 0; j < n; j++) {
        const double *row = factor + j * n, found = x[j] /= row[j];
        for (int64_t i = j + 1; i < n; i++) x[i] -= row[i] * found;
    }
    for (int64_t j = n - 1; j >= 0; j--) {
        const double *row = factor + j * n;
        double sum = x[j];
        for (int64_t i = j + 1; i < n; i++) sum -= row[i] * x[i];
        x[j] = sum / row[j];
    }
}

/* The upper triangle of C_F diag(w) C_Fᵀ to `gram`, for the n rows in `index` */
PART void form_one(Alone *x, int64_t n, const double *w) {
    const int64_t M = x->rows;
    for (int64_t i = 0; i < n * n; i++) x->gram[i] = 0.0;
    for (int64_t k = 0; k < x->outputs; k++) {
        double *c = x->packed;
        if (w[k] == 0.0) continue;
        for (int64_t i = 0; i < n; i++) c[i] = x->turned[k * M + x->index[i]];
        for (int64_t i = 0; i < n; i++) {
            const double f = w[k] * c[i];
            if (f == 0.0) continue;
            for (int64_t j = i; j < n; j++) x->gram[i * n + j] += f * c[j];
        }
    }
}

#endif
