/* Vectors of float32, with twice as many samples side by side as lanes.h, and products with a matrix that
 * all samples share: of one group of samples, or of two at once, so that each number of the matrix is
 * read for both. The sums of a sample are the same to the bit. */
#ifndef TAUT_ABREAST_H
#define TAUT_ABREAST_H

#include "lanes.h"

#define ABREAST 2           /* groups worked on together */
#define SPAN 8              /* matrices are filled up to a multiple of it */
#define SAMPLES (2 * LANES) /* of a group: two blocks of lanes */

#if defined(__clang__) || __GNUC__ >= 12
#if LANES == 8
#define SIDE_BY_SIDE 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif LANES == 4
#define SIDE_BY_SIDE 0, 1, 2, 3, 4, 5, 6, 7
#else
#define SIDE_BY_SIDE 0, 1, 2, 3
#endif
#endif

typedef float singles __attribute__((vector_size(8 * LANES)));
typedef int32_t flags __attribute__((vector_size(8 * LANES))); /* −1 is true */

INLINE singles every(float x) { return x - (singles){0}; }
/* GCC makes one instruction of neither by itself. */
#if LANES == 4 && defined(__x86_64__) && !defined(__clang__)
#define PICK(m, yes, no) __builtin_ia32_blendvps256(no, yes, (singles)(m))
#define LARGER(x, y) __builtin_ia32_maxps256(x, y)
#elif LANES == 8 && defined(__x86_64__) && !defined(__clang__)
#define LARGER(x, y) __builtin_ia32_maxps512_mask(x, y, y, (short)-1, 4)
#endif
#ifndef PICK
#define PICK(m, yes, no) (singles)((m & (flags)yes) | (~m & (flags)no))
#endif
#ifndef LARGER
#define LARGER(x, y) PICK((x > y), x, y)
#endif
INLINE singles pick(flags m, singles yes, singles no) { return PICK(m, yes, no); }
INLINE int some(flags m) { return any((mask)m); }
INLINE singles size_of(singles x) { return (singles)((flags)x & INT32_MAX); }
/* Of two numbers; NaN as y is taken, which shows in the end. */
INLINE singles most_of(singles x, singles y) { return LARGER(x, y); }

INLINE int64_t spans(int64_t n) { return (n + SPAN - 1) / SPAN * SPAN; }

/* to[0 … size) = Σ_j m[j·stride + t]·x[j], `size` a constant; with `two`, of x2 beside it. With six sums
 * of two groups at a time, 16 registers are full. */
INLINE void product(const float *m, int64_t stride, const singles *x, const singles *x2, int64_t count,
                    singles *to, singles *to2, const int size, const int two) {
    singles sum[SPAN], sum2[SPAN];
#pragma GCC unroll 8
    for (int t = 0; t < size; t++) sum[t] = sum2[t] = every(0.0f);
    for (int64_t j = 0; j < count; j++) {
        const singles one = x[j], other = x2[j];
#pragma GCC unroll 8
        for (int t = 0; t < size; t++) {
            const singles number = every(m[j * stride + t]);
            sum[t] += number * one;
            if (two) sum2[t] += number * other;
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < size; t++) {
        to[t] = sum[t];
        if (two) to2[t] = sum2[t];
    }
}

/* One tile at a time, the last two of them of much the same size */
INLINE void products(const float *m, int64_t n, const singles *x, const singles *x2, int64_t count,
                     singles *to, singles *to2, const int two) {
    const int64_t stride = spans(n), full = two ? 6 : SPAN;
    int64_t i = 0;
#define PRODUCT(size) product(m + i, stride, x, x2, count, to + i, to2 + i, size, two), i += size
    while (n - i > SPAN) two ? (PRODUCT(6)) : (PRODUCT(SPAN));
    if (n - i > full) PRODUCT(4);
    switch (n - i) {
    case 8: PRODUCT(8); break;
    case 7: PRODUCT(7); break;
    case 6: PRODUCT(6); break;
    case 5: PRODUCT(5); break;
    case 4: PRODUCT(4); break;
    case 3: PRODUCT(3); break;
    case 2: PRODUCT(2); break;
    case 1: PRODUCT(1); break;
    }
#undef PRODUCT
}

/* to = mᵀx of the groups in `live`, a bit for each */
PART void products_of(const float *m, int64_t n, int64_t count, singles *const *x, singles *const *to,
                      int live) {
    if (live == 3) {
        products(m, n, x[0], x[1], count, to[0], to[1], 1);
    } else if (live) {
        const int h = live >> 1;
        products(m, n, x[h], x[h], count, to[h], to[h], 0);
    }
}

#endif
