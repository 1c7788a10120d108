// Compiled kernels of the NumPy device: what NumPy does in a dozen passes, in one. See compiled.py, which calls them.
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define BLOCK 64  // queries, and keys, of a block of attention's scores

INLINE int bits_of(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
INLINE float float_of(int bits) { float x; memcpy(&x, &bits, 4); return x; }

#define NAME(name) name##_plain
#define LANES 4
#define ROWS 4
#define COLUMNS 2
#include "kernels.h"
#undef NAME
#undef LANES
#undef ROWS
#undef COLUMNS

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#define NAME(name) name##_avx2
#define LANES 8
#define ROWS 4
#define COLUMNS 2
#include "kernels.h"
#undef NAME
#undef LANES
#undef ROWS
#undef COLUMNS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
#define NAME(name) name##_avx512
#define LANES 16
#define ROWS 8
#define COLUMNS 2
#include "kernels.h"
#pragma GCC pop_options
#endif

// The best set of instructions that this processor has.
EXPORT const char *instructions(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "plain";
}
