#ifdef __x86_64__
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#endif
#define LANES 8
#define VARIANT(name) name##_v4
#include "entries.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
