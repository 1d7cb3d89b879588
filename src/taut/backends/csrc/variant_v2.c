#define LANES 2
#define VARIANT(name) name##_v2
#include "entries.h"
