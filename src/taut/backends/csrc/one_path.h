/* The interior point method for a sample alone: the steps of solvers/interior.py, one to one. The sample
 * comes with rows of length 1 and with a point of the path, as torch begins it. */
#ifndef TAUT_ONE_PATH_H
#define TAUT_ONE_PATH_H

#include "interior.h"
#include "one.h"

/* A sample of the call: the rows, then, with bounds on z, the outputs */
typedef struct {
    const Trail *of;
    Alone one;
    int64_t rows, all;
    double *t, unit_z, unit_u, dt;
    double *nu, *below, *above, *up, *down, *u, *z, *r;
    const double *lower, *upper;
    const int8_t *equal, *low, *high;
    double *theta, *lift_low, *lift_high, *moved, *size, *d, *dr, *d_below, *d_above, *d_up, *d_down;
    double *goal_low, *goal_high, *off, *terms;
    double *w, *eased, *share, *du, *y; /* outputs */
} Walk;

static int64_t lay_out_walk(Walk *x, double *base) {
    double **of_all[] = {&x->theta, &x->lift_low, &x->lift_high, &x->moved, &x->size, &x->d, &x->dr,
                         &x->d_below, &x->d_above, &x->d_up, &x->d_down, &x->goal_low, &x->goal_high,
                         &x->off, &x->terms};
    double **of_outputs[] = {&x->w, &x->eased, &x->share, &x->du, &x->y};
    int64_t at = 0;
    for (size_t i = 0; i < sizeof of_all / sizeof *of_all; i++) *of_all[i] = cut_room(base, &at, x->all);
    for (size_t i = 0; i < sizeof of_outputs / sizeof *of_outputs; i++)
        *of_outputs[i] = cut_room(base, &at, x->one.outputs);
    return at;
}

static void *make_walk(const Trail *of, Walk *x) {
    *x = (Walk){.of = of, .rows = of->rows, .all = of->rows + (of->boxed ? of->outputs : 0)};
    x->one = (Alone){.p = of->plan, .rows = of->rows, .outputs = of->outputs};
    const int64_t first = lay_out_alone(&x->one, NULL);
    double *memory = malloc((first + lay_out_walk(x, NULL) + 1) * sizeof *memory);
    if (!memory) return NULL;
    lay_out_alone(&x->one, memory);
    lay_out_walk(x, memory + first);
    for (int64_t i = 0; i < x->rows; i++) x->one.index[i] = i;
    return memory;
}

/* Sample n of the call, where it is */
PART void read_walk(const Trail *of, Walk *x, int64_t n) {
    const int64_t L = x->all, K = of->outputs;
    read_matrix(&x->one, of->matrix + n * of->stride);
    x->one.v = of->v + n * K;
    x->lower = of->lower + n * L;
    x->upper = of->upper + n * L;
    x->equal = of->equal + n * L;
    x->low = of->low + n * L;
    x->high = of->high + n * L;
    x->unit_z = of->unit_z[n];
    x->unit_u = of->unit_u[n];
    x->t = of->t + n;
    x->nu = of->nu + n * L;
    x->below = of->below + n * L;
    x->above = of->above + n * L;
    x->up = of->up + n * L;
    x->down = of->down + n * L;
    x->r = of->r + n * L;
    x->u = of->u + n * K;
    x->z = of->z + n * K;
}

/* The rows times z, or of their sizes; then z itself, where it has bounds */
INLINE void image_of_walk(const Walk *x, const double *z, int sign, double *to) {
    image_of(&x->one, z, sign, to);
    for (int64_t k = 0; k < x->all - x->rows; k++) to[x->rows + k] = z[k];
}

/* to ← factor·v + the adjoint of the rows */
INLINE void pull_of_walk(const Walk *x, const double *nu, double factor, double *to) {
    pull_of(&x->one, nu, 1, to);
    for (int64_t k = 0; k < x->one.outputs; k++) to[k] += factor * x->one.v[k];
    for (int64_t k = 0; k < x->all - x->rows; k++) to[k] += nu[x->rows + k];
}

INLINE double off_below(const Walk *x, int64_t i) {
    return x->low[i] ? x->r[i] - x->lower[i] - x->below[i] : 0.0;
}
INLINE double off_above(const Walk *x, int64_t i) {
    return x->high[i] ? x->upper[i] - x->r[i] - x->above[i] : 0.0;
}
INLINE int is_open(const Walk *x, int64_t i) { return !(x->equal[i] || x->low[i] || x->high[i]); }

/* The mean of slack times multiplier, after a step of this length */
PART double gap_of_walk(const Walk *x, double length) {
    double total = 0.0, count = 0.0;
    for (int64_t i = 0; i < x->all; i++) {
        if (x->low[i])
            total += (x->up[i] + length * x->d_up[i]) * (x->below[i] + length * x->d_below[i]);
        if (x->high[i])
            total += (x->down[i] + length * x->d_down[i]) * (x->above[i] + length * x->d_above[i]);
        count += x->low[i] + x->high[i];
    }
    return total / (count > 1.0 ? count : 1.0);
}

/* The size of each row's terms, and what is left of the conditions, relative to it */
PART double error_of_walk(Walk *x) {
    double largest = 0.0, longest = 0.0, worst = 0.0;
    for (int64_t k = 0; k < x->one.outputs; k++) x->y[k] = size_of_one(x->z[k]);
    image_of_walk(x, x->y, 0, x->size);
    for (int64_t i = 0; i < x->all; i++) {
        if (x->equal[i]) x->size[i] += size_of_one(x->lower[i]);
        largest = most_of_two(largest, x->size[i]);
        longest = most_of_two(longest, size_of_one(x->nu[i]));
    }
    if (x->of->line) largest = most_of_two(largest, x->unit_z);
    const double unit = x->unit_u + longest;
    for (int64_t i = 0; i < x->all; i++) {
        x->size[i] = most_of_two(x->size[i] + LEAST * largest, TINY);
        double off = x->equal[i] ? size_of_one(x->r[i] - x->lower[i]) : 0.0;
        off = most_of_two(off, most_of_two(size_of_one(off_below(x, i)), size_of_one(off_above(x, i))));
        double left = off / x->size[i];
        if (x->low[i]) left = most_of_two(left, least_of(x->below[i] / x->size[i], x->up[i] / unit));
        if (x->high[i]) left = most_of_two(left, least_of(x->above[i] / x->size[i], x->down[i] / unit));
        if (!(left < INFINITY) || !(x->r[i] - x->r[i] == 0.0) || !(x->nu[i] - x->nu[i] == 0.0))
            return INFINITY;
        worst = most_of_two(worst, left);
    }
    return worst;
}

/* (C W Cᵀ + Θ), factorised; bounds on z are eliminated. Is there a factor? */
PART int factorise_walk(Walk *x) {
    Alone *one = &x->one;
    const int64_t n = x->rows;
    for (int64_t i = 0; i < x->all; i++) {
        x->lift_low[i] = x->low[i] ? x->up[i] / x->below[i] : 0.0;
        x->lift_high[i] = x->high[i] ? x->down[i] / x->above[i] : 0.0;
        const double theta = 1.0 / most_of_two(x->lift_low[i] + x->lift_high[i], 1e-30);
        x->theta[i] = x->equal[i] ? 0.0 : is_open(x, i) ? 1e30 : theta;
    }
    x->dt = least_of(*x->t * (FASTER - 1.0), 1.0 - *x->t);
    for (int64_t k = 0; k < one->outputs; k++) {
        x->w[k] = x->eased[k] = curve_at(one->p, k, x->u[k]).slope[0];
        x->y[k] = x->dt * x->w[k] * one->v[k];
        if (x->all == n) continue;
        x->share[k] = 1.0 / (x->w[k] + x->theta[n + k]);
        x->eased[k] *= x->theta[n + k] * x->share[k];
    }
    image_of_walk(x, x->y, 1, x->moved);
    form_one(one, n, x->eased);
    for (int64_t i = 0; i < n; i++) {
        one->own[i] = one->gram[i * n + i] + TINY;
        one->diagonal[i] = one->gram[i * n + i] + x->theta[i] + 1e-14 * one->own[i];
    }
    int found = factorise_one(n, one->gram, one->diagonal, one->factor);
    for (double lift = 1e-13; !found && lift < 1e-2; lift *= 30.0) {
        for (int64_t i = 0; i < n; i++) one->diagonal[i] += lift * one->own[i];
        found = factorise_one(n, one->gram, one->diagonal, one->factor);
    }
    return found;
}

/* d ← (C W Cᵀ + Θ)⁻¹d */
PART void solve_walk(Walk *x) {
    Alone *one = &x->one;
    const int64_t n = x->rows;
    for (int64_t i = 0; i < x->all; i++) x->d[i] = is_open(x, i) ? 0.0 : x->d[i];
    if (x->all > n) {
        for (int64_t k = 0; k < one->outputs; k++) x->y[k] = x->w[k] * x->d[n + k] * x->share[k];
        image_of(one, x->y, 1, one->more);
        for (int64_t i = 0; i < n; i++) x->d[i] -= one->more[i];
    }
    solve_one(n, one->factor, x->d);
    for (int64_t i = 0; i < n; i++) x->d[i] = is_open(x, i) ? 0.0 : x->d[i];
    if (x->all == n) return;
    pull_of(one, x->d, 1, x->y);
    for (int64_t k = 0; k < one->outputs; k++) {
        const double found = (x->d[n + k] - x->w[k] * x->y[k]) * x->share[k];
        x->d[n + k] = is_open(x, n + k) ? 0.0 : found;
    }
}

/* The direction in which slack times multiplier changes by the goals: `move` of interior.py */
PART void move_walk(Walk *x) {
    for (int64_t i = 0; i < x->all; i++) {
        double pull = 0.0;
        if (x->low[i]) pull += (x->goal_low[i] - x->up[i] * off_below(x, i)) / x->below[i];
        if (x->high[i]) pull -= (x->goal_high[i] - x->down[i] * off_above(x, i)) / x->above[i];
        x->d[i] = (x->equal[i] ? x->lower[i] - x->r[i] : x->theta[i] * pull) - x->moved[i];
    }
    solve_walk(x);
    pull_of_walk(x, x->d, x->dt, x->du);
    for (int64_t k = 0; k < x->one.outputs; k++) x->y[k] = x->w[k] * x->du[k];
    image_of_walk(x, x->y, 1, x->dr);
    for (int64_t i = 0; i < x->all; i++) {
        const int low = x->low[i], high = x->high[i], both = low && high;
        const double d = x->d[i], goal_low = x->goal_low[i], goal_high = x->goal_high[i];
        double below = x->dr[i] + off_below(x, i), above = off_above(x, i) - x->dr[i];
        const double up = low ? (goal_low - x->up[i] * below) / x->below[i] : 0.0;
        const double down = high ? (goal_high - x->down[i] * above) / x->above[i] : 0.0;
        /* The nearly inactive side by its own formula, the other from dν: nothing cancels. */
        const int nearer = x->lift_low[i] >= x->lift_high[i];
        x->d_up[i] = both ? (nearer ? d + down : up) : low ? d : 0.0;
        x->d_down[i] = both ? (nearer ? down : up - d) : high ? -d : 0.0;
        if (x->lift_low[i] > 1.0)
            below = (goal_low - x->below[i] * x->d_up[i]) / most_of_two(x->up[i], TINY);
        if (x->lift_high[i] > 1.0)
            above = (goal_high - x->above[i] * x->d_down[i]) / most_of_two(x->down[i], TINY);
        x->d_below[i] = low ? below : 0.0;
        x->d_above[i] = high ? above : 0.0;
    }
}

/* The longest step, up to 1, in which all stays positive and u moves not too far */
PART double length_of_walk(const Walk *x, double part) {
    double length = 1.0;
    for (int64_t i = 0; i < x->all; i++) {
        if (x->d_below[i] < 0.0) length = least_of(length, -part * x->below[i] / x->d_below[i]);
        if (x->d_above[i] < 0.0) length = least_of(length, -part * x->above[i] / x->d_above[i]);
        if (x->d_up[i] < 0.0) length = least_of(length, -part * x->up[i] / x->d_up[i]);
        if (x->d_down[i] < 0.0) length = least_of(length, -part * x->down[i] / x->d_down[i]);
    }
    for (int64_t k = 0; !x->of->line && k < x->one.outputs; k++) {
        const double reach = LEAP * (1.0 + 0.25 * size_of_one(x->u[k]));
        length = least_of(length, reach / most_of_two(size_of_one(x->du[k]), TINY));
    }
    return length;
}

/* C z where the step of this length ends, less what was predicted: is that good? */
PART int is_predicted(Walk *x, double length, double curve, double slop) {
    double excess = 0.0, farthest = 0.0, largest = 0.0;
    for (int64_t k = 0; k < x->one.outputs; k++) {
        const double z = curve_at(x->one.p, k, x->u[k] + length * x->du[k]).z[0];
        x->y[k] = z;
        x->w[k] = size_of_one(z);
    }
    image_of_walk(x, x->y, 1, x->off);
    image_of_walk(x, x->w, 0, x->terms);
    for (int64_t i = 0; i < x->all; i++) {
        const double off = x->off[i] - x->r[i] - length * x->dr[i];
        if (off != off) return 0;
        excess += x->d[i] * off;
        farthest = most_of_two(farthest, size_of_one(off));
        largest = most_of_two(largest, x->terms[i] + x->size[i]);
    }
    if (x->dt > 0.0) return farthest <= LOOSE * largest;
    return size_of_one(excess) <= 0.7 * length * curve + slop;
}

/* As far along the move as what is predicted of C z is good */
PART void advance_walk(Walk *x) {
    double length = length_of_walk(x, NEARLY), curve = 0.0, slop = 0.0;
    for (int64_t i = 0; i < x->all; i++) {
        const double theta = x->equal[i] || is_open(x, i) ? 0.0 : x->theta[i];
        curve += x->d[i] * (x->dr[i] + theta * x->d[i]);
        slop += 1e-12 * size_of_one(x->d[i]) * x->size[i];
    }
    curve = size_of_one(curve);
    for (int time = 0; time < 20 && !x->of->line; time++) {
        if (is_predicted(x, length, curve, slop)) break;
        length *= 0.4;
    }
    *x->t += length * x->dt;
    if (*x->t > 1.0 - 1e-12) *x->t = 1.0;
    for (int64_t i = 0; i < x->all; i++) {
        x->below[i] += length * x->d_below[i];
        x->above[i] += length * x->d_above[i];
        x->up[i] += length * x->d_up[i];
        x->down[i] += length * x->d_down[i];
        x->nu[i] = x->equal[i] ? x->nu[i] + length * x->d[i] : x->up[i] - x->down[i];
    }
    pull_of_walk(x, x->nu, *x->t, x->u);
    for (int64_t k = 0; k < x->one.outputs; k++) x->z[k] = curve_at(x->one.p, k, x->u[k]).z[0];
    image_of_walk(x, x->z, 1, x->r);
    for (int64_t i = 0; i < x->all; i++) {
        double room = x->r[i] - x->lower[i];
        if (x->low[i] && room > x->below[i]) x->below[i] = least_of(room, 2.0 * x->below[i]);
        room = x->upper[i] - x->r[i];
        if (x->high[i] && room > x->above[i]) x->above[i] = least_of(room, 2.0 * x->above[i]);
    }
}

/* Mehrotra's predictor and corrector, with one factor; false where there is none. */
PART int step_walk(Walk *x) {
    if (!factorise_walk(x)) return 0;
    const double gap = gap_of_walk(x, 0.0);
    for (int64_t i = 0; i < x->all; i++) {
        x->goal_low[i] = -x->up[i] * x->below[i];
        x->goal_high[i] = -x->down[i] * x->above[i];
    }
    move_walk(x);
    const double length = length_of_walk(x, 1.0), second = length * length;
    double ratio = gap_of_walk(x, length) / most_of_two(gap, TINY);
    ratio = ratio < 0.0 ? 0.0 : ratio > 1.0 ? 1.0 : ratio;
    double centring = length < 0.1 ? 1.0 : ratio * ratio * ratio;
    if (*x->t < 1.0 && centring < 0.1) centring = 0.1;
    for (int64_t i = 0; i < x->all; i++) {
        x->goal_low[i] += centring * gap - second * x->d_up[i] * x->d_below[i];
        x->goal_high[i] += centring * gap - second * x->d_down[i] * x->d_above[i];
    }
    move_walk(x);
    advance_walk(x);
    return 1;
}

/* Sample n of the call, so many steps farther, or to its end */
PART void walk_sample(Trail *of, Walk *x, int64_t n) {
    read_walk(of, x, n);
    double *seen = of->seen + n * of->kept * of->rows;
    memset(x->d_below, 0, x->all * sizeof(double));
    memset(x->d_above, 0, x->all * sizeof(double));
    memset(x->d_up, 0, x->all * sizeof(double));
    memset(x->d_down, 0, x->all * sizeof(double));
    for (int64_t step = 0;; step++) {
        const double error = error_of_walk(x);
        if (step && step % of->every == 0) {
            memcpy(seen, x->nu, of->rows * sizeof(double));
            seen += of->rows;
        }
        of->stopped[n] = (error <= of->tol && *x->t == 1.0) || !(error < INFINITY);
        if (of->stopped[n] || step == of->steps) break;
        of->iterations[n]++;
        if (!step_walk(x)) {
            of->stopped[n] = 1;
            break;
        }
    }
    __atomic_fetch_sub(&of->unsolved, 1, __ATOMIC_RELAXED);
}

#endif
