// Causal attention, tile by tile: O(t) memory, tiles above the diagonal skipped, keys and values of a group never
// repeated. Dao 2023 (arXiv:2307.08691), algorithms 1 and 2.
//
// qkv (b, t, (h + 2k) e): h query heads, k key heads, k value heads; query head i reads key/value head i / (h / k).
// HEAD: e rounded up to a multiple of 16, the width that tiles have in shared memory (the rest is zero).
//
// Note on determinism. Algorithm 2 adds dQ from several blocks at once, in whatever order they run. Here one kernel
// makes dK and dV, each tile of keys in one block that walks down the queries, and another makes dQ, each tile of
// queries in one block that walks along the keys. Scores are made once more (7 products a tile instead of 5), and
// every sum has one order.
#include "numbers.cuh"
#include "tile.cuh"

#ifndef HEAD
#define HEAD 64
#endif
#define PAD (16 / (int)sizeof(T))
#define LD (HEAD + PAD)  // rows of a tile start in different banks, and on 16 bytes
#define LP (TILE + PAD)  // of a strip of scores

SHARED_MEMORY(shared);

struct Shape {  // of one call
    long long t, heads, kv_heads, e;
    INLINE long long width() const { return (heads + 2 * kv_heads) * e; }
    INLINE long long group() const { return heads / kv_heads; }
    INLINE int rows(long long first) const { return (int)(t - first < TILE ? t - first : TILE); }
};

// Whether the query at position q sees the key at position k; segments: of this sequence, or null.
INLINE bool sees(long long q, long long k, long long t, const int* segments) {
    return k <= q && q < t && (!segments || segments[q] == segments[k]);
}

// The base of the exponential: 16-bit types take the fast one, whose error is far below theirs.
INLINE A raised(A x) {
    if constexpr (sizeof(T) == 2) return exp2f(x * 1.4426950408889634f);
    return exponential(x);
}

template <typename F> INLINE A across_row(A value, F combine) {  // over the four lanes that share a row
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, 1));
    return combine(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// grid (tiles, h, b) -> y (b, t, h e), lse (b, h, t)
KERNEL attention(const T* qkv, const int* segments, T* y, A* lse, long long t, long long heads, long long kv_heads,
                 long long e, double scale) {
    Shape shape = {t, heads, kv_heads, e};
    T *q = (T*)shared, *k = q + TILE * LD, *v = k + TILE * LD, *p = v + TILE * LD + warp() * 16 * LP;
    long long tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;  // the longest walks first
    long long width = shape.width(), q0 = tile * TILE, strip = q0 + warp() * 16;
    const T *queries = qkv + sequence * t * width + head * e;
    const T *keys = qkv + sequence * t * width + (heads + head / shape.group()) * e, *values = keys + kv_heads * e;
    if (segments) segments += sequence * t;
    load_tile<HEAD>(q, LD, queries + q0 * width, width, shape.rows(q0), (int)e);

    Strip<HEAD> out;
    out.clear();
    A top[2] = {LOWEST, LOWEST}, total[2] = {0, 0};  // of each of the lane's two rows, so far
    for (long long k0 = 0; k0 <= q0; k0 += TILE) {
        __syncthreads();
        load_tile<HEAD>(k, LD, keys + k0 * width, width, shape.rows(k0), (int)e);
        load_tile<HEAD>(v, LD, values + k0 * width, width, shape.rows(k0), (int)e);
        __syncthreads();
        Strip<TILE> s;
        s.clear();
        multiply<TILE, HEAD, true>(s, q + warp() * 16 * LD, LD, k, LD);
        A highest[2] = {top[0], top[1]};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool seen = sees(strip + row_of(i), k0 + column_of(j, i), t, segments);
                s.at[j][i] = seen ? s.at[j][i] * (A)scale : LOWEST;
                highest[i / 2] = larger(highest[i / 2], s.at[j][i]);
            }
        A sum[2] = {0, 0}, factor[2];
        for (int r = 0; r < 2; r++) {
            highest[r] = across_row(highest[r], [](A x, A y) { return larger(x, y); });
            factor[r] = raised(top[r] - highest[r]);
            top[r] = highest[r];
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {  // while a row has seen nothing its top is LOWEST: exp(0) must not count
                s.at[j][i] = s.at[j][i] > LOWEST ? raised(s.at[j][i] - top[i / 2]) : (A)0;
                sum[i / 2] += s.at[j][i];
            }
        for (int r = 0; r < 2; r++) total[r] = total[r] * factor[r] + across_row(sum[r], [](A x, A y) { return x + y; });
#pragma unroll
        for (int j = 0; j < HEAD / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) out.at[j][i] *= factor[i / 2];
        keep(s, p, LP);
        multiply<HEAD, TILE, false>(out, p, LP, v, LD);
    }
    int rows = shape.rows(q0) - warp() * 16;
    store(out, y + (sequence * t + strip) * heads * e + head * e, heads * e, rows, (int)e, 1 / total[0], 1 / total[1]);
    if (lane() % 4 == 0)
        for (int r = 0; r < 2; r++)
            if (row_of(2 * r) < rows) lse[(sequence * heads + head) * t + strip + row_of(2 * r)] = top[r] + logarithm(total[r]);
}

// dots (b, h, t) = sums over a head of dy * y; one warp a position and head
KERNEL attention_dots(const T* dy, const T* y, A* dots, long long t, long long heads, long long e, long long count) {
    long long item = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;  // position * heads + head
    if (item >= count) return;
    A sum = 0;
    for (long long c = lane(); c < e; c += 32) sum += widen(dy[item * e + c]) * widen(y[item * e + c]);
    sum = warp_sum(sum);
    long long position = item / heads, head = item % heads;
    if (lane() == 0) dots[(position / t * heads + head) * t + position % t] = sum;
}

// With P = exp(S - lse) and dP = dy V':  dS = P (dP - dots),  dV = P' dy,  dK = scale dS' Q,  dQ = scale dS K.

// grid (tiles, k, b): dK and dV of a tile of keys. Scores lie transposed: rows are keys, columns are queries.
KERNEL attention_backward_keys(const T* dy, const T* qkv, const A* lse, const A* dots, const int* segments, T* dqkv,
                               long long t, long long heads, long long kv_heads, long long e, double scale) {
    Shape shape = {t, heads, kv_heads, e};
    T *q = (T*)shared, *g = q + TILE * LD, *k = g + TILE * LD, *v = k + TILE * LD, *p = v + TILE * LD + warp() * 16 * LP;
    A *column_lse = (A*)(v + TILE * LD + TILE * LP), *column_dots = column_lse + TILE;
    long long k0 = (long long)blockIdx.x * TILE, kv = blockIdx.y, sequence = blockIdx.z;
    long long width = shape.width(), strip = k0 + warp() * 16;
    const T* sequence_qkv = qkv + sequence * t * width;
    long long key_column = (heads + kv) * e, value_column = key_column + kv_heads * e;
    if (segments) segments += sequence * t;
    load_tile<HEAD>(k, LD, sequence_qkv + k0 * width + key_column, width, shape.rows(k0), (int)e);
    load_tile<HEAD>(v, LD, sequence_qkv + k0 * width + value_column, width, shape.rows(k0), (int)e);

    Strip<HEAD> dk, dv;
    dk.clear();
    dv.clear();
    for (long long head = kv * shape.group(); head < (kv + 1) * shape.group(); head++)
        for (long long q0 = k0; q0 < t; q0 += TILE) {
            __syncthreads();
            load_tile<HEAD>(q, LD, sequence_qkv + q0 * width + head * e, width, shape.rows(q0), (int)e);
            load_tile<HEAD>(g, LD, dy + (sequence * t + q0) * heads * e + head * e, heads * e, shape.rows(q0), (int)e);
            for (int i = threadIdx.x; i < shape.rows(q0); i += THREADS) {
                column_lse[i] = lse[(sequence * heads + head) * t + q0 + i];
                column_dots[i] = dots[(sequence * heads + head) * t + q0 + i];
            }
            __syncthreads();
            Strip<TILE> s, ds;
            s.clear();
            ds.clear();
            multiply<TILE, HEAD, true>(s, k + warp() * 16 * LD, LD, q, LD);
            multiply<TILE, HEAD, true>(ds, v + warp() * 16 * LD, LD, g, LD);
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int c = column_of(j, i);
                    bool seen = sees(q0 + c, strip + row_of(i), t, segments);
                    s.at[j][i] = seen ? raised(s.at[j][i] * (A)scale - column_lse[c]) : (A)0;
                    ds.at[j][i] = seen ? s.at[j][i] * (ds.at[j][i] - column_dots[c]) : (A)0;
                }
            keep(s, p, LP);
            multiply<HEAD, TILE, false>(dv, p, LP, g, LD);
            keep(ds, p, LP);
            multiply<HEAD, TILE, false>(dk, p, LP, q, LD);
        }
    int rows = shape.rows(k0) - warp() * 16;
    T* to = dqkv + (sequence * t + strip) * width;
    store(dk, to + key_column, width, rows, (int)e, (A)scale, (A)scale);
    store(dv, to + value_column, width, rows, (int)e, (A)1, (A)1);
}

// grid (tiles, h, b): dQ of a tile of queries
KERNEL attention_backward_queries(const T* dy, const T* qkv, const A* lse, const A* dots, const int* segments, T* dqkv,
                                  long long t, long long heads, long long kv_heads, long long e, double scale) {
    Shape shape = {t, heads, kv_heads, e};
    T *q = (T*)shared, *g = q + TILE * LD, *k = g + TILE * LD, *v = k + TILE * LD, *p = v + TILE * LD + warp() * 16 * LP;
    long long tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    long long width = shape.width(), q0 = tile * TILE, strip = q0 + warp() * 16;
    const T *queries = qkv + sequence * t * width + head * e;
    const T *keys = qkv + sequence * t * width + (heads + head / shape.group()) * e, *values = keys + kv_heads * e;
    if (segments) segments += sequence * t;
    load_tile<HEAD>(q, LD, queries + q0 * width, width, shape.rows(q0), (int)e);
    load_tile<HEAD>(g, LD, dy + (sequence * t + q0) * heads * e + head * e, heads * e, shape.rows(q0), (int)e);
    A row_lse[2] = {0, 0}, row_dots[2] = {0, 0};
    int rows = shape.rows(q0) - warp() * 16;
    for (int r = 0; r < 2; r++)
        if (row_of(2 * r) < rows) {
            row_lse[r] = lse[(sequence * heads + head) * t + strip + row_of(2 * r)];
            row_dots[r] = dots[(sequence * heads + head) * t + strip + row_of(2 * r)];
        }

    Strip<HEAD> dq;
    dq.clear();
    for (long long k0 = 0; k0 <= q0; k0 += TILE) {
        __syncthreads();
        load_tile<HEAD>(k, LD, keys + k0 * width, width, shape.rows(k0), (int)e);
        load_tile<HEAD>(v, LD, values + k0 * width, width, shape.rows(k0), (int)e);
        __syncthreads();
        Strip<TILE> s, ds;
        s.clear();
        ds.clear();
        multiply<TILE, HEAD, true>(s, q + warp() * 16 * LD, LD, k, LD);
        multiply<TILE, HEAD, true>(ds, g + warp() * 16 * LD, LD, v, LD);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool seen = sees(strip + row_of(i), k0 + column_of(j, i), t, segments);
                A probability = seen ? raised(s.at[j][i] * (A)scale - row_lse[i / 2]) : (A)0;
                ds.at[j][i] = probability * (ds.at[j][i] - row_dots[i / 2]);
            }
        keep(ds, p, LP);
        multiply<HEAD, TILE, false>(dq, p, LP, k, LD);
    }
    store(dq, dqkv + (sequence * t + strip) * width + head * e, width, rows, (int)e, (A)scale, (A)scale);
}
