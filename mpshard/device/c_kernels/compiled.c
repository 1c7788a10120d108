// Compiled kernels of the NumPy device: what NumPy does in a dozen passes, in one. See compiled.py, which calls them.
#include <math.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#define X86  // and a compiler that can be told to use what only some processors have
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define BLOCK 64  // queries, and keys, of a block of attention's scores

INLINE int bits_of(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
INLINE float float_of(int bits) { float x; memcpy(&x, &bits, 4); return x; }

#define NAME(name) name##_plain
#define LANES 4
#define ROWS 4
#define COLUMNS 2
#include "all.h"

#ifdef X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#define NAME(name) name##_avx2
#define LANES 8
#define ROWS 4
#define COLUMNS 2
#include "all.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
#define NAME(name) name##_avx512
#define LANES 16
#define ROWS 8
#define COLUMNS 2
#include "all.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
#define NAME(name) name##_bf16
#define LANES 16
#define ROWS 8
#define COLUMNS 2
#define BF16
#include "product.h"
#pragma GCC pop_options
#endif

// Whether float32's products are better ours: OpenBLAS has no kernels for AMD's processors with AVX-512 and takes Intel's.
EXPORT int multiplies(void) {
#ifdef X86
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
#else
    return 0;
#endif
}

// Whether there are products of bfloat16.
EXPORT int multiplies_bf16(void) {
#ifdef X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16") != 0;
#else
    return 0;
#endif
}

// One more with every change of what a kernel takes or does; compiled.py refuses a library that was built from older sources.
EXPORT int version(void) { return 2; }

// The best set of instructions that this processor has.
EXPORT const char *instructions(void) {
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "plain";
}
