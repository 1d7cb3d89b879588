/* What is not compiled for each kind of processor: which kind this is, and the layout of calls. */
#include "calls.h"

#ifdef TAUT_PROFILE
uint64_t taut_ticks[16];
#endif

/* The last variant that this processor can run: 2 for any, 3 with AVX2, 4 with AVX-512. */
int64_t taut_newest(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq")) return 3;
    return __builtin_cpu_supports("avx512vl") ? 4 : 3;
#else
    return 2;
#endif
}

/* The structures as text, "Name: type field; …" a line: cpu.py builds its own from it. */
const char *taut_layout(void) {
#define TELL(type, name) #type " " #name ";"
    return "Plan:" PLAN(TELL) "\nRules:" RULES(TELL) "\nSolve:" SOLVE(TELL) "\nBackward:" BACKWARD(TELL)
        "\nStable:" STABLE(TELL) "\nLoss:" LOSS(TELL) "\nTrain:" TRAIN(TELL) "\nLine:" LINE(TELL)
        "\nWithin:" WITHIN(TELL) "\nPull:" PULL(TELL)
        "\nOne:" ONE(TELL) "\nTrail:" TRAIL(TELL);
}
