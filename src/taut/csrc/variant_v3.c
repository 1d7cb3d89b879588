#ifdef __x86_64__
#pragma GCC target("avx2,fma")
#define VARIANT(name) name##_v3
#include "entries.h"
#endif
