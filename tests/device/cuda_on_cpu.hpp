// CUDA C++ on the CPU, for tests: what the kernels use of the language. cuda_on_cpu.cpp runs a grid's threads.
#pragma once
#include <cmath>
#include <cstring>

#define HOST_SHIM
#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define SHARED_MEMORY(name) static uint4* const name = (uint4*)shim::dynamic_memory

struct Dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
extern Dim3 threadIdx, blockIdx, blockDim, gridDim;

inline unsigned __float_as_uint(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned atomicMax(unsigned* at, unsigned value) {  // threads take turns here
    unsigned old = *at;
    if (value > old) *at = value;
    return old;
}

inline float half_to_float(unsigned short bits) {
    unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    float size = exponent ? ldexpf(1024.0f + fraction, (int)exponent - 25) : ldexpf((float)fraction, -24);
    return sign ? -size : size;
}
inline unsigned short float_to_half(float x) {  // to the nearest, ties to even
    unsigned short sign = __float_as_uint(x) >> 16 & 0x8000;
    if (x != x) return 0x7fff;
    float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent = size < 6.103515625e-5f ? -14 : ilogbf(size);
    unsigned steps = (unsigned)nearbyintf(ldexpf(size, 10 - exponent));  // 1024 ... 2048, less if subnormal
    return sign | (unsigned short)(steps + (unsigned)(exponent + 14) * 1024);
}

namespace shim {
extern char dynamic_memory[];
enum Wait { RUNNING, IDLE, FOR_WARP, FOR_BLOCK };
void pause_for(Wait wait);  // until all threads of the warp or block have come here
struct Message { unsigned words[8]; };
Message* messages();  // of this thread's block, another set at every call
void run(Dim3 grid, unsigned threads, size_t shared, void (*kernel)(void**), void** args);

// Put a message where the warp sees it, wait for all, return the warp's messages.
template <typename M> inline const Message* exchange(const M& message) {
    static_assert(sizeof(M) <= sizeof(Message));
    Message* set = messages();
    memcpy(&set[threadIdx.x], &message, sizeof(M));
    pause_for(FOR_WARP);
    return set + threadIdx.x / 32 * 32;
}
}  // namespace shim

inline void __syncthreads() { shim::pause_for(shim::FOR_BLOCK); }
inline void __syncwarp() { shim::pause_for(shim::FOR_WARP); }
template <typename S> inline S __shfl_xor_sync(unsigned, S value, int distance) {
    const shim::Message* warp = shim::exchange(value);
    memcpy(&value, &warp[threadIdx.x % 32 ^ (unsigned)distance], sizeof(S));
    return value;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
    const shim::Message* warp = shim::exchange((unsigned)predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= (warp[lane].words[0] & 1) << lane;
    return bits;
}
// mma.m16n8k16, from the PTX ISA's figures of who holds which element. `to_float`: of a 16-bit word.
template <typename F>
inline void mma_on_cpu(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], F to_float) {
    struct { unsigned a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const shim::Message* warp = shim::exchange(mine);
    unsigned lane = threadIdx.x % 32;
    auto half = [&](unsigned word, unsigned upper) { return to_float((unsigned short)(upper ? word >> 16 : word)); };
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (unsigned k = 0; k < 16; k++) {
            const unsigned* from_a = warp[row % 8 * 4 + k % 8 / 2].words;
            const unsigned* from_b = warp[column * 4 + k % 8 / 2].words + 4;
            c[i] += half(from_a[row / 8 + k / 8 * 2], k % 2) * half(from_b[k / 8], k % 2);
        }
    }
}
#define mma(c, a, b, type) mma_on_cpu(c, a, b, [](unsigned short bits) { return widen(T{bits}); })
