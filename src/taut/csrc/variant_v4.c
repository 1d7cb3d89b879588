#ifdef __x86_64__
#pragma GCC target("avx512f,avx512dq,avx512vl,avx2,fma")
#define VARIANT(name) name##_v4
#include "entries.h"
#endif
