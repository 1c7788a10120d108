// Sums over columns and over whole arrays, in two passes whose order depends on the sizes alone.
#include "numbers.cuh"

#define LANES 32  // columns of a block
#define LINES 8   // rows it reads at a time

// partial (gridDim.y, d) of x (rows, d): line k sums rows [k height, (k + 1) height). Blocks of 256 threads.
KERNEL column_sum(const T* x, A* partial, long long rows, long long d, long long height) {
    __shared__ A lines[LINES][LANES + 1];
    int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
    long long c = (long long)blockIdx.x * LANES + lane, end = (blockIdx.y + 1LL) * height;
    A sum = 0;
    if (c < d)
        for (long long row = blockIdx.y * height + line; row < (end < rows ? end : rows); row += LINES)
            sum += widen(x[row * d + c]);
    lines[line][lane] = sum;
    __syncthreads();
    if (line == 0 && c < d) {
        for (int other = 1; other < LINES; other++) sum += lines[other][lane];
        partial[blockIdx.y * d + c] = sum;
    }
}

// out (d), U, = or += the sum of the lines of partial (count, d)
KERNEL column_sum_finish(const A* partial, U* out, long long count, long long d, bool accumulate) {
    every(d, false, [&](long long c, auto) {
        A sum = 0;
        for (long long line = 0; line < count; line++) sum += partial[line * d + c];
        narrow(accumulate ? (A)(widen(out[c]) + sum) : sum, out[c]);
    });
}

// partial (gridDim.x), float64: sums of squares
KERNEL square_sum(const T* x, double* partial, long long size) {
    double sum = 0;
    every(size, aligned(x), [&](long long i, auto width) {
        auto at = load(x + i, width);
        EACH(j, width) sum += (double)widen(at.at[j]) * (double)widen(at.at[j]);
    });
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// out[0] = sum of parts (count), in one block
KERNEL total(const U* parts, double* out, long long count) {
    double sum = 0;
    for (long long i = threadIdx.x; i < count; i += blockDim.x) sum += (double)widen(parts[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) out[0] = sum;
}
