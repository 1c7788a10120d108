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

// exp, of a float or of a vector of them: x = n ln 2 + r, |r| <= ln 2 / 2; of r a polynomial with the least largest relative error;
// 2^n from its exponent's bits, which for n = -127 are those of 0 and for n = 128 of infinity.
#define LOG2_E 1.44269504088896341f
#define ROUNDER 12582912.0f  // 1.5 * 2^23: an integer in the lower bits of what it is added to
#define EXP_BIAS (0x4B400000 - 127)
#define EXP_REST(x, n) ((x) - (n) * 0.693145751953125f - (n) * 1.42860682030941723212e-6f)
#define EXP_OF_REST(r) ({ __auto_type r_ = (r); \
    ((((8.290272206068039e-3f * r_ + 4.189816117286682e-2f) * r_ + 0.1666763871908188f) * r_ + 0.4999914765357971f) * r_ + \
     0.9999997019767761f) * r_ + 1.0f; })

INLINE int bits_of(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
INLINE float float_of(int bits) { float x; memcpy(&x, &bits, 4); return x; }

// An argument of a call that is made again: as it is, or so many bytes from one of several places that differ from time to time.
#define WORDS 15
union word { long integer; float real; void *pointer; };
struct call { void (*function)(const union word *); union word words[WORDS]; signed char places[WORDS]; };

#define NAME(name) name##_plain
#define LANES 4
#define LARGER(a, b) NAME(choose)((a) > (b), a, b)  // the larger of each, b where they cannot be compared
#define ROWS 4
#define COLUMNS 2
#include "all.h"

#ifdef X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2")
#define NAME(name) name##_avx2
#define LANES 8
#define LARGER(a, b) ((vec)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define ROWS 4
#define COLUMNS 2
#include "all.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
#define NAME(name) name##_avx512
#define LANES 16
#define LARGER(a, b) ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define ROWS 8
#define COLUMNS 2
#include "all.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi2,prefer-vector-width=512")
#define NAME(name) name##_bf16
#define LANES 16
#define LARGER(a, b) ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define ROWS 8
#define COLUMNS 2
#define BF16
#include "vectors.h"
#include "product.h"
#include "again.h"
#pragma GCC pop_options
#endif

// Calls one after another. A word's place: -1 as it is, else places[place], a pointer that the word counts bytes from. The word
// at place 0 is not a pointer: it is `accumulate`.
EXPORT void replay(long n, const struct call *calls, char *const *places, long accumulate) {
    for (const struct call *call = calls; call < calls + n; call++) {
        union word words[WORDS];
        for (int i = 0; i < WORDS; i++) {
            int place = call->places[i];
            words[i] = call->words[i];
            if (place > 0) words[i].pointer = places[place] + call->words[i].integer;
            else if (place == 0) words[i].integer = accumulate;
        }
        call->function(words);
    }
}

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
EXPORT int version(void) { return 4; }

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
