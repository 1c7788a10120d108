// Attention of a few new positions over cached keys and values: what sampling needs.
#include "numbers.cuh"

#define WIDEST 8  // elements of a head a lane holds: heads up to 256 wide

// cache (b, capacity, 2k e): keys and values of qkv (b, t, (h + 2k) e) go to positions past ... past + t - 1
KERNEL cache_append(const T* qkv, T* cache, long long t, long long past, long long capacity, long long width,
                    long long kept, long long rows) {
    ROWS(row, rows) {  // rows = b t, kept = 2k e
        const T* from = qkv + (row + 1) * width - kept;
        T* to = cache + (row / t * capacity + past + row % t) * kept;
        for (long long c = threadIdx.x; c < kept; c += blockDim.x) to[c] = from[c];
    }
}

// grid (t, h, b), blocks of 128: y (b, t, h e) of the queries in qkv over cache[:, : past + position + 1].
// Each warp walks over every fourth key, its lanes side by side along the head; then the warps' sums are joined.
KERNEL cached_attention(const T* qkv, const T* cache, T* y, long long t, long long past, long long capacity,
                        long long heads, long long kv_heads, long long e, double scale) {
    __shared__ A tops[4], totals[4], sums[4][32 * WIDEST];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long position = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z, kept = 2 * kv_heads * e;
    const T* query = qkv + (sequence * t + position) * (heads + 2 * kv_heads) * e + head * e;
    const T* keys = cache + sequence * capacity * kept + head / (heads / kv_heads) * e;
    A top = LOWEST, total = 0, sum[WIDEST] = {};
    for (long long k = warp; k <= past + position; k += 4) {
        const T *key = keys + k * kept, *value = key + kv_heads * e;
        A score = 0;
        for (long long c = lane; c < e; c += 32) score += widen(query[c]) * widen(key[c]);
        score = warp_sum(score) * (A)scale;
        A highest = larger(top, score), factor = exponential(top - highest), p = exponential(score - highest);
        top = highest;
        total = total * factor + p;
        for (int i = 0; i < WIDEST; i++)
            if (i * 32 + lane < e) sum[i] = sum[i] * factor + p * widen(value[i * 32 + lane]);
    }
    if (lane == 0) tops[warp] = top, totals[warp] = total;
    for (int i = 0; i < WIDEST; i++) sums[warp][i * 32 + lane] = sum[i];
    __syncthreads();
    A highest = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])), factor[4], whole = 0;
    for (int w = 0; w < 4; w++) {
        factor[w] = exponential(tops[w] - highest);
        whole += totals[w] * factor[w];
    }
    for (long long c = threadIdx.x; c < e; c += blockDim.x) {
        A joined = 0;
        for (int w = 0; w < 4; w++) joined += sums[w][c] * factor[w];
        narrow(joined / whole, y[((sequence * t + position) * heads + head) * e + c]);
    }
}
