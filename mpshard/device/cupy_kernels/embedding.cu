// Embedding rows, their gradient in a fixed order, and rotary positions.
#include "numbers.cuh"

SHARED_MEMORY(shared);

// out (n, d) = table (v, d)[ids]. An id outside the table makes a row of NaN: an error cannot be raised from here.
KERNEL embedding(const long long* ids, const T* table, T* out, long long n, long long d, long long v) {
    ROWS(row, n) {
        long long id = ids[row];
        bool known = id >= 0 && id < v;
        columns(d, aligned(table, out), [&](long long c, auto width) {
            Piece<T, decltype(width)::value> at;
            EACH(j, width) narrow((A)__uint_as_float(0x7fffffffu), at.at[j]);
            if (known) at = load(table + id * d + c, width);
            save(out + row * d + c, at);
        });
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
    ROWS(row, n) {
        const U *c = cosines + row % lines * half, *s = sines + row % lines * half;
        bool wide = aligned(qkv, cosines, sines) && half % WIDE == 0 && width % WIDE == 0;
        columns(heads * half, wide, [&](long long i, auto width_of) {
            int j = (int)i % (int)half;
            T *low = qkv + row * width + (int)i / (int)half * 2 * half + j, *high = low + half;
            auto x = load(low, width_of), y = load(high, width_of);
            auto cosine = load(c + j, width_of), sine = load(s + j, width_of);
            EACH(k, width_of) {
                A a = widen(x.at[k]), b = widen(y.at[k]), by = (A)widen(cosine.at[k]), turn = (A)widen(sine.at[k]);
                if (inverse) turn = -turn;
                narrow(a * by - b * turn, x.at[k]);
                narrow(b * by + a * turn, y.at[k]);
            }
            save(low, x);
            save(high, y);
        });
    }
}
