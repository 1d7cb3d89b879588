#ifdef __x86_64__
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define LANES 4
#define VARIANT(name) name##_v3
#include "entries.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
