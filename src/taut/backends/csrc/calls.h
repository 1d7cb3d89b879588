/* What Python hands over. Every structure is a list of fields, which also becomes the text that
 * cpu.py builds its own structures from: neither side can misread the other. */
#ifndef TAUT_CALLS_H
#define TAUT_CALLS_H

#include <stdint.h>

#define TILE 4
#define LIMIT 30 /* of iterations: where fewer are allowed, they are counted one by one */

/* A and σ, laid out by plan.py */
#define PLAN(FIELD)                                                                              \
    FIELD(int64_t, outputs)         /* K, filled up to a multiple of TILE */                     \
    FIELD(int64_t, given)           /* K */                                                      \
    FIELD(int64_t, rows)            /* of A, reordered and filled up to a multiple of TILE */    \
    FIELD(int64_t, kept)            /* those that Newton works with, which come first */         \
    FIELD(int64_t, disjoint)        /* of those the ones, again first, that share no output */   \
    FIELD(int64_t, constraints)     /* I */                                                      \
    FIELD(int64_t, positive)        /* is no a·z negative? */                                    \
    FIELD(const int64_t *, order)   /* the row of A that each is, or −1 for filling */           \
    FIELD(const double *, a)        /* rows × outputs */                                         \
    FIELD(const double *, absolute) /* the same without signs */                                 \
    FIELD(const double *, sizes)    /* Σ|a| of each row */                                       \
    FIELD(const double *, largest)  /* max|a| of each row */                                     \
    FIELD(double, even)             /* Cholesky is safe for derivatives from this w_min/w_max on */ \
    FIELD(double, faint)            /* and ∂v of this part of what it is summed from; or from */ \
    FIELD(double, safe)             /* this part times the running error of the pivots */        \
    /* Where A is mostly zeros, its non-zeros by row, and by output for the rows kept; and the   \
     * products of two in one output, by entry of the lower triangle of A diag(w) Aᵀ. */         \
    FIELD(const int64_t *, row_start)                                                            \
    FIELD(const int64_t *, row_output)                                                           \
    FIELD(const double *, row_value)                                                             \
    FIELD(const int64_t *, output_start)                                                         \
    FIELD(const int64_t *, output_row)                                                           \
    FIELD(const double *, output_value)                                                          \
    FIELD(const int64_t *, entry_start)                                                          \
    FIELD(const int64_t *, entry_output)                                                         \
    FIELD(const double *, entry_value)                                                           \
    FIELD(const double *, flat)     /* kept × kept: the inverse of A Aᵀ */                       \
    FIELD(const double *, inverse)  /* that of A diag(w) Aᵀ where σ is a line, or NULL */        \
    /* For float32, filled up to a multiple of 8 along the last dimension: see single.h */       \
    FIELD(int64_t, worked)          /* the rows kept, without filling; 0: all is in float64 */   \
    FIELD(const float *, lines)     /* A by row: worked × outputs */                             \
    FIELD(const float *, columns)   /* A by output: given × rows */                              \
    FIELD(const float *, pairs)     /* a_ik·a_jk, for 8 pairs i ≥ j at a time: given × 8 */      \
    FIELD(const float *, inverse_single) /* `flat`: worked × rows */                             \
    FIELD(const float *, straight)  /* `flat` times A: worked × outputs */                       \
    FIELD(const float *, shares)    /* the part of Σ|a| that counts in the size of a residual */ \
    FIELD(int64_t, bending)         /* outputs whose σ bends: 0 where all are lines */           \
    FIELD(const int8_t *, bends)    /* which; NULL: all */                                       \
    FIELD(int64_t, anchored)        /* has every combination of equations outputs that do not? */ \
    FIELD(int64_t, uniform)         /* the kind of all, where all are plain and alike; else −1 */ \
    FIELD(const int8_t *, kind)                                                                  \
    FIELD(const int8_t *, plain)    /* without shift, scale and temperature */                   \
    FIELD(const double *, shift)                                                                 \
    FIELD(const double *, scale)                                                                 \
    FIELD(const double *, temperature)                                                           \
    FIELD(const double *, lower)                                                                 \
    FIELD(const double *, upper)                                                                 \
    /* what each row can come to, −inf and inf for filling, and the size of the terms */         \
    FIELD(const double *, least)                                                                 \
    FIELD(const double *, most)                                                                  \
    FIELD(const double *, least_terms)                                                           \
    FIELD(const double *, most_terms)                                                            \
    FIELD(const double *, first)    /* the two numbers of an SRLU, which one.h alone knows */    \
    FIELD(const double *, second)

/* Rules of backends/base.py, which says what each means */
#define RULES(FIELD)        \
    FIELD(double, reach)    \
    FIELD(double, wild)     \
    FIELD(double, damped)   \
    FIELD(double, level)    \
    FIELD(double, overshoot) \
    FIELD(double, undershoot) \
    FIELD(double, cut)      \
    FIELD(double, growth)   \
    FIELD(double, longest)  \
    FIELD(int64_t, trials)  \
    FIELD(int64_t, chords)  \
    FIELD(double, gain)     \
    FIELD(double, lost)     \
    FIELD(double, far)      \
    FIELD(double, unit)     \
    FIELD(double, near)     \
    FIELD(double, pivot)    \
    FIELD(double, dependent) \
    FIELD(double, fair)     \
    FIELD(double, rough)    \
    FIELD(double, idle)

/* Where σ is a line, what is left of the rows of G when those of A are eliminated: see plan.py */
#define LINE(FIELD)                                                                              \
    FIELD(int64_t, equations)       /* rows of A, filled up to a multiple of TILE */             \
    FIELD(int64_t, rows)            /* of G, likewise */                                         \
    FIELD(const double *, inverse)  /* (A W Aᵀ)⁻¹, equations × equations */                      \
    FIELD(const double *, through)  /* (A W Aᵀ)⁻¹A W Gᵀ, equations × rows */                     \
    FIELD(const double *, q)        /* rows × rows */                                            \
    FIELD(const double *, root)     /* of its diagonal */                                        \
    FIELD(const double *, norm)     /* the same, 1 where it is 0 */                              \
    FIELD(const double *, made_of)  /* what a pivot of Q is left of, and its running error */    \
    FIELD(double, error)            /* the running error of the pivots of A W Aᵀ */

#define SOLVE(FIELD)                                                                    \
    FIELD(const Plan *, plan)                                                           \
    FIELD(const Rules *, rules)                                                         \
    FIELD(const void *, v)                                                              \
    FIELD(const void *, b)                                                              \
    FIELD(const void *, start) /* may be NULL: 0 */                                     \
    FIELD(const int64_t *, index) /* the row of `start` that each has; NULL: its own */ \
    FIELD(const int8_t *, left_out) /* samples × I: what each leaves out of all rows, or NULL */ \
    FIELD(void *, multipliers)                                                          \
    FIELD(void *, u)                                                                    \
    FIELD(void *, z)                                                                    \
    FIELD(void *, residual)                                                             \
    FIELD(int64_t *, iterations)                                                        \
    FIELD(int64_t *, status)   /* 0 is solved, −1 open: all are, at first */            \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, single)     /* float32 in and out */                                 \
    FIELD(int64_t, b_stride)                                                            \
    FIELD(int64_t, limit)      /* of iterations */                                      \
    FIELD(int64_t, next)       /* the first sample nobody works on */                   \
    FIELD(int64_t, unsolved)   /* how many are not solved, at first all */              \
    FIELD(int64_t, held)       /* at first 0; 1: v holds an output of a solved sample */ \
    FIELD(double, target)                                                               \
    FIELD(double, cap)         /* the rule: what CONVERGED promises */                  \
    FIELD(double, share)                                                                \
    FIELD(double, slack)       /* of b at an end of what its row can come to */         \
    FIELD(double, huge)        /* the largest number of the dtype */

#define BACKWARD(FIELD)                                                                 \
    FIELD(const Plan *, plan)                                                           \
    FIELD(const Rules *, rules)                                                         \
    FIELD(const void *, u)                                                              \
    FIELD(const void *, g_multipliers) /* gradients may be NULL */                      \
    FIELD(const void *, g_u)                                                            \
    FIELD(const void *, g_z)                                                            \
    FIELD(const int64_t *, status)                                                      \
    FIELD(void *, dv)                                                                   \
    FIELD(void *, db)                  /* NaN where they could not be found */          \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, single)                                                              \
    FIELD(int64_t, next)                                                                \
    FIELD(int64_t, unsolved)

#define STABLE(FIELD)                                                                   \
    FIELD(const double *, a)           /* N × I × K, or one for all */                  \
    FIELD(int64_t, stride)             /* of samples in `a` */                          \
    FIELD(const int8_t *, left_out)    /* N × I, equations that take no part, or NULL */ \
    FIELD(const double *, metric)      /* N × I × I, or one for all, or NULL */         \
    FIELD(int64_t, metric_stride)      /* of samples in `metric` */                     \
    FIELD(const double *, w)                                                            \
    FIELD(const double *, g_z)                                                          \
    FIELD(const double *, g_u)                                                          \
    FIELD(const double *, g_v)                                                          \
    FIELD(double *, x)                                                                  \
    FIELD(double *, s)                                                                  \
    FIELD(double *, t)                                                                  \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, equations)                                                           \
    FIELD(int64_t, outputs)                                                             \
    FIELD(int64_t, next)                                                                \
    FIELD(int64_t, unsolved)

#define WITHIN(FIELD)                                                                   \
    FIELD(const Plan *, plan)  /* of C = [A; G], A filled up by itself */               \
    FIELD(const Line *, line)  /* NULL where σ is none */                               \
    FIELD(const Rules *, rules)                                                         \
    FIELD(const double *, lowest)  /* the ends of the range of each output */           \
    FIELD(const double *, highest)                                                      \
    FIELD(const double *, norm)    /* the length of each row, 1 for filling */           \
    FIELD(const int64_t *, only) /* the output of a row of G with one entry, else −1; or NULL */ \
    FIELD(const void *, v)                                                              \
    FIELD(const void *, lower)                                                          \
    FIELD(const void *, upper)                                                          \
    FIELD(const void *, floor)   /* bounds on z, or NULL */                             \
    FIELD(const void *, ceiling)                                                        \
    FIELD(const void *, start) /* may be NULL: 0, or what has begun */                  \
    FIELD(void *, multipliers)                                                          \
    FIELD(void *, u)                                                                    \
    FIELD(void *, z)                                                                    \
    FIELD(void *, residual)                                                             \
    FIELD(int64_t *, iterations)                                                        \
    FIELD(int64_t *, status)                                                            \
    FIELD(int64_t, held)       /* at first 0; 1: v holds an output of a solved sample */ \
    FIELD(int64_t, begun)      /* do they hold the solution of the equations alone? */  \
    FIELD(int64_t, equations)  /* rows of A, as filled up in the plan */                \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, single)                                                              \
    FIELD(int64_t, limit)      /* of Newton's steps */                                  \
    FIELD(int64_t, inner)      /* of the interior point method */                       \
    FIELD(int64_t, next)                                                                \
    FIELD(int64_t, unsolved)                                                            \
    FIELD(double, target)                                                               \
    FIELD(double, cap)                                                                  \
    FIELD(double, slack)                                                                \
    FIELD(double, huge)

#define PULL(FIELD)                                                                     \
    FIELD(const Plan *, plan)                                                           \
    FIELD(const Line *, line)                                                           \
    FIELD(const Rules *, rules)                                                         \
    FIELD(const void *, u)                                                              \
    FIELD(const void *, multipliers)                                                    \
    FIELD(const void *, lower)                                                          \
    FIELD(const void *, upper)                                                          \
    FIELD(const void *, floor)                                                          \
    FIELD(const void *, ceiling)                                                        \
    FIELD(const void *, g_multipliers) /* gradients may be NULL */                      \
    FIELD(const void *, g_u)                                                            \
    FIELD(const void *, g_z)                                                            \
    FIELD(const int64_t *, status)                                                      \
    FIELD(void *, dv)                                                                   \
    FIELD(void *, dlower)              /* those from here on may be NULL */             \
    FIELD(void *, dupper)                                                               \
    FIELD(void *, dfloor)                                                               \
    FIELD(void *, dceiling)                                                             \
    FIELD(int8_t *, left)              /* 1 where they could not be found: at first all */ \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, single)                                                              \
    FIELD(int64_t, next)                                                                \
    FIELD(int64_t, unsolved)

/* Newton's method for samples alone, in float64: see one_arc.h */
#define ONE(FIELD)                                                                      \
    FIELD(const Plan *, plan)      /* σ */                                              \
    FIELD(const Rules *, rules)                                                         \
    FIELD(const double *, matrix)  /* C, or that of each sample */                      \
    FIELD(int64_t, stride)         /* from one to the next: 0 where they share it */    \
    FIELD(const double *, v)                                                            \
    FIELD(const double *, lower)                                                        \
    FIELD(const double *, upper)                                                        \
    FIELD(const double *, floor)   /* bounds on z, or NULL */                           \
    FIELD(const double *, ceiling)                                                      \
    FIELD(const double *, lowest)  /* where z may be */                                 \
    FIELD(const double *, highest)                                                      \
    FIELD(const double *, unit)    /* of a move of u where no σ bends; NULL: it is free */ \
    FIELD(double *, multipliers)   /* the start, and the end */                         \
    FIELD(double *, u)                                                                  \
    FIELD(double *, z)                                                                  \
    FIELD(double *, w)                                                                  \
    FIELD(double *, r)                                                                  \
    FIELD(double *, level)                                                              \
    FIELD(int64_t *, iterations)                                                        \
    FIELD(int64_t *, status)                                                            \
    FIELD(int64_t, rows)                                                                \
    FIELD(int64_t, outputs)                                                             \
    FIELD(int64_t, line)           /* does no σ bend? */                                \
    FIELD(int64_t, last)           /* are steps damped, and rows that depend endured? */ \
    FIELD(int64_t, budget)                                                              \
    FIELD(double, target)                                                               \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, next)                                                                \
    FIELD(int64_t, unsolved)

/* Steps along the path of the interior point method, for samples alone: see one_path.h */
#define TRAIL(FIELD)                                                                    \
    FIELD(const Plan *, plan)                                                           \
    FIELD(const double *, matrix)  /* rows of length 1 */                               \
    FIELD(int64_t, stride)                                                              \
    FIELD(const double *, v)                                                            \
    FIELD(const double *, lower)   /* of rows, then of outputs where they have bounds */ \
    FIELD(const double *, upper)                                                        \
    FIELD(const int8_t *, equal)                                                        \
    FIELD(const int8_t *, low)     /* is there a lower side? */                         \
    FIELD(const int8_t *, high)                                                         \
    FIELD(const double *, unit_z)                                                       \
    FIELD(const double *, unit_u)                                                       \
    FIELD(double *, t)             /* the point, from here on */                        \
    FIELD(double *, nu)                                                                 \
    FIELD(double *, below)                                                              \
    FIELD(double *, above)                                                              \
    FIELD(double *, up)                                                                 \
    FIELD(double *, down)                                                               \
    FIELD(double *, u)                                                                  \
    FIELD(double *, z)                                                                  \
    FIELD(double *, r)                                                                  \
    FIELD(double *, seen)          /* ν of the rows after every few steps */            \
    FIELD(int64_t, kept)           /* how many of them there are */                     \
    FIELD(int64_t, every)                                                               \
    FIELD(int8_t *, stopped)                                                            \
    FIELD(int64_t *, iterations)                                                        \
    FIELD(int64_t, steps)          /* to take now */                                    \
    FIELD(int64_t, rows)                                                                \
    FIELD(int64_t, outputs)                                                             \
    FIELD(int64_t, boxed)          /* has z bounds? */                                  \
    FIELD(int64_t, line)                                                                \
    FIELD(double, tol)                                                                  \
    FIELD(int64_t, samples)                                                             \
    FIELD(int64_t, next)                                                                \
    FIELD(int64_t, unsolved)

#define LOSS(FIELD)               \
    FIELD(const Plan *, plan)     \
    FIELD(const void *, v)        \
    FIELD(const void *, b)        \
    FIELD(const void *, y)        \
    FIELD(const void *, u)        \
    FIELD(const void *, multipliers) \
    FIELD(void *, loss)           \
    FIELD(int64_t, samples)       \
    FIELD(int64_t, single)        \
    FIELD(int64_t, b_stride)      \
    FIELD(int64_t, next)          \
    FIELD(int64_t, unsolved)

/* solve, loss and memory at once; λ goes to `multipliers` of the solve, and nothing else of it */
#define TRAIN(FIELD)                                                                    \
    FIELD(Solve *, solve)                                                               \
    FIELD(const void *, y)                                                              \
    FIELD(void *, loss)                                                                 \
    FIELD(void *, dv)          /* (z − y)·scale */                                      \
    FIELD(double, scale)                                                                \
    FIELD(void *, table)       /* the memory, which `start` and `index` read; or NULL */ \
    FIELD(int64_t, entries)    /* of the memory */                                      \
    FIELD(int64_t, seen)       /* how many samples were worked on */                    \
    FIELD(int64_t, stopped)    /* has one been left open? Then the others are in vain */ \
    FIELD(int64_t, unsolved)   /* at first all; 0: all are solved, and stored */        \
    FIELD(double, total)       /* Σ loss */

#define DECLARE(type, name) type name;
typedef struct { PLAN(DECLARE) } Plan;
typedef struct { RULES(DECLARE) } Rules;
typedef struct { LINE(DECLARE) } Line;
typedef struct { SOLVE(DECLARE) } Solve;
typedef struct { BACKWARD(DECLARE) } Backward;
typedef struct { STABLE(DECLARE) } Stable;
typedef struct { WITHIN(DECLARE) } Within;
typedef struct { PULL(DECLARE) } Pull;
typedef struct { ONE(DECLARE) } One;
typedef struct { TRAIL(DECLARE) } Trail;
typedef struct { LOSS(DECLARE) } Loss;
typedef struct { TRAIN(DECLARE) } Train;
#undef DECLARE

#endif
