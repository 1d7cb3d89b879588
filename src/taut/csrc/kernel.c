/* The entry points: the variant compiled for the best this processor can do. */
#include "calls.h"

#define VARIANTS(name, type) void name##_v2(type *), name##_v3(type *), name##_v4(type *)
VARIANTS(taut_solve, Solve);
VARIANTS(taut_backward, Backward);
VARIANTS(taut_loss, Loss);

#ifdef TAUT_PROFILE
uint64_t taut_ticks[16];
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#define CHOOSE(name, call)                                                                \
    (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&           \
             __builtin_cpu_supports("avx512vl")                                           \
         ? name##_v4(call)                                                                \
     : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? name##_v3(call) \
                                                                       : name##_v2(call))
#else
#define CHOOSE(name, call) name##_v2(call)
#endif

void taut_solve(Solve *call) { CHOOSE(taut_solve, call); }
void taut_backward(Backward *call) { CHOOSE(taut_backward, call); }
void taut_loss(Loss *call) { CHOOSE(taut_loss, call); }

/* So that kernel.py can tell whether it speaks of the same structures. */
int64_t taut_layout(void) {
    return sizeof(Plan) + 1000 * sizeof(Solve) + 1000000 * sizeof(Backward) + 1000000000 * sizeof(Loss);
}
