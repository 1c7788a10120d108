// Embedding rows, their gradient in a fixed order, and rotary positions.
#include "numbers.cuh"

SHARED_MEMORY(shared);

// out (n, d) = table (v, d)[ids]. An id outside the table makes a row of NaN: an error cannot be raised from here.
KERNEL embedding(const long long* ids, const T* table, T* out, long long n, long long d, long long v) {
    EVERY(i, n * d) {
        long long id = ids[i / d];
        if (id >= 0 && id < v) out[i] = table[id * d + i % d];
        else narrow((A)__uint_as_float(0x7fffffffu), out[i]);
    }
}

// out (v, d), U, += rows of dy (n, d) at ids, in the order of their positions.
//
// One block a position. The block of an id's first position sums all rows of that id, in `sums` (d): the others have
// nothing to do. Every block looks through all ids, n^2 compares: at 2^14 tokens less than a thousandth of a step,
// and there is no sort, which CuPy could not do without waiting for the GPU.
KERNEL embedding_backward(const T* dy, const long long* ids, U* out, long long n, long long d, long long v) {
    __shared__ unsigned matches[32];
    A* sums = (A*)shared;
    long long position = blockIdx.x, id = ids[position];
    unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (id < 0 || id >= v) return;
    A earlier = 0;
    for (long long i = threadIdx.x; i < position; i += blockDim.x) earlier += ids[i] == id;
    if (block_sum(earlier) > 0) return;
    for (long long c = threadIdx.x; c < d; c += blockDim.x) sums[c] = 0;
    for (long long start = position; start < n; start += blockDim.x) {
        long long i = start + threadIdx.x;
        unsigned match = __ballot_sync(0xffffffffu, i < n && ids[i] == id);
        __syncthreads();
        if (threadIdx.x % 32 == 0) matches[warp] = match;
        __syncthreads();
        for (unsigned w = 0; w < warps; w++)
            for (unsigned rest = matches[w]; rest; rest &= rest - 1) {
                const T* row = dy + (start + w * 32 + __ffs((int)rest) - 1) * d;
                for (long long c = threadIdx.x; c < d; c += blockDim.x) sums[c] += widen(row[c]);
            }
    }
    for (long long c = threadIdx.x; c < d; c += blockDim.x) narrow((A)(widen(out[id * d + c]) + sums[c]), out[id * d + c]);
}

// Turns the first `heads` heads, of width 2 half, of every row of qkv (n, width), in place: element j of a head with
// j + half. cos, sin (n or t, half), U; row i takes line i % lines. inverse: the other way round.
KERNEL rotary(T* qkv, const U* cosines, const U* sines, long long n, long long heads, long long half, long long width,
              long long lines, bool inverse) {
    EVERY(i, n * heads * half) {
        long long j = i % half, head = i / half % heads, row = i / half / heads;
        T* at = qkv + row * width + head * 2 * half + j;
        A c = (A)widen(cosines[row % lines * half + j]), s = (A)widen(sines[row % lines * half + j]);
        A x = widen(at[0]), y = widen(at[half]);
        if (inverse) s = -s;
        narrow(x * c - y * s, at[0]);
        narrow(y * c + x * s, at[half]);
    }
}
