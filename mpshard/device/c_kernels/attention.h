// Attention, forward and backward. Included by compiled.c like elementwise.h, whose exp it takes.
//
// Blocks of 64 x 64 scores never leave the first-level cache, and what lies above the diagonal is not computed.
// LANES: floats of a vector. ROWS x COLUMNS vectors of a product's tile stay in registers.

// out[i][j] = or += sum over k of a[i * a_row + k * a_k] * b[k * b_row + j], for rows x (columns vectors), in registers.
#define TILE(rows, columns) TILE_(rows, columns)
#define TILE_(rows, columns)                                                                                            \
    INLINE void NAME(tile_##rows##x##columns)(long k, const float *a, long a_row, long a_k, const float *b, long b_row, \
                                             float *out, long out_row, int add) {                                      \
        vec sum[rows][columns];                                                                                         \
        for (int i = 0; i < rows; i++)                                                                                  \
            for (int j = 0; j < columns; j++) sum[i][j] = add ? *(vec *)(out + i * out_row + j * LANES) : (vec){0};     \
        for (long n = 0; n < k; n++, a += a_k, b += b_row) {                                                            \
            vec right[columns];                                                                                         \
            for (int j = 0; j < columns; j++) right[j] = *(const vec *)(b + j * LANES);                                 \
            for (int i = 0; i < rows; i++)                                                                              \
                for (int j = 0; j < columns; j++) sum[i][j] += a[i * a_row] * right[j];                                 \
        }                                                                                                               \
        for (int i = 0; i < rows; i++)                                                                                  \
            for (int j = 0; j < columns; j++) *(vec *)(out + i * out_row + j * LANES) = sum[i][j];                      \
    }
TILE(ROWS, COLUMNS)
TILE(ROWS, 1)
TILE(1, COLUMNS)
TILE(1, 1)
#define CALL_TILE_(rows, columns) NAME(tile_##rows##x##columns)
#define CALL_TILE(rows, columns) CALL_TILE_(rows, columns)

// Some rows (at most ROWS) of out (n columns, whole vectors) = or += a @ b over k.
INLINE void NAME(strip)(long rows, long n, long k, const float *a, long a_row, long a_k, const float *b, long b_row, float *out,
                        long out_row, int add) {
    long j = 0, wide = COLUMNS * LANES;
    if (rows == ROWS) {
        for (; j + wide <= n; j += wide) CALL_TILE(ROWS, COLUMNS)(k, a, a_row, a_k, b + j, b_row, out + j, out_row, add);
        for (; j < n; j += LANES) CALL_TILE(ROWS, 1)(k, a, a_row, a_k, b + j, b_row, out + j, out_row, add);
    } else {
        for (long i = 0; i < rows; i++) {
            for (j = 0; j + wide <= n; j += wide)
                CALL_TILE(1, COLUMNS)(k, a + i * a_row, a_row, a_k, b + j, b_row, out + i * out_row + j, out_row, add);
            for (; j < n; j += LANES)
                CALL_TILE(1, 1)(k, a + i * a_row, a_row, a_k, b + j, b_row, out + i * out_row + j, out_row, add);
        }
    }
}

static long NAME(up)(long n, long step) { return (n + step - 1) / step * step; }
static long NAME(least)(long a, long b) { return a < b ? a : b; }
#define UP NAME(up)
#define LEAST NAME(least)

// Scores of m queries (rows of a) with BLOCK keys (columns of b); on the diagonal only what is on or below it, in whole vectors.
static void NAME(scores)(long m, long e, const float *a, long a_row, const float *b, float *s, int diagonal) {
    for (long i = 0; i < m; i += ROWS) {
        long rows = LEAST(ROWS, m - i), n = diagonal ? LEAST(BLOCK, UP(i + rows, LANES)) : BLOCK;
        NAME(strip)(rows, n, e, a + i * a_row, a_row, 1, b, BLOCK, s + i * BLOCK, BLOCK, 0);
    }
}

// out (m, e) += or = p (m, k) @ b (k, e); on the diagonal p is zero above it.
static void NAME(weighted)(long m, long k, long e, const float *p, const float *b, long b_row, float *out, long out_row, int diagonal,
                           int add) {
    for (long i = 0; i < m; i += ROWS) {
        long rows = LEAST(ROWS, m - i), limit = diagonal ? LEAST(k, i + rows) : k;
        NAME(strip)(rows, e, limit, p + i * BLOCK, BLOCK, 1, b, b_row, out + i * out_row, out_row, add);
    }
}

// out (k, e) += p (m, k)' @ b (m, e); on the diagonal p is zero above it.
static void NAME(gathered)(long m, long k, long e, const float *p, const float *b, float *out, int diagonal) {
    for (long j = 0; j < k; j += ROWS) {
        long rows = LEAST(ROWS, k - j), first = diagonal ? LEAST(j, m) : 0;
        NAME(strip)(rows, e, m - first, p + first * BLOCK + j, 1, BLOCK, b + first * e, e, out + j * e, e, 1);
    }
}

// Columns of each block of keys next to each other: x (t rows, `stride` apart, e) -> blocks (e, BLOCK), zero past the end.
static void NAME(turn)(long t, long stride, long e, const float *x, float *out) {
    for (long first = 0; first < t; first += BLOCK, out += e * BLOCK)
        for (long i = 0; i < BLOCK; i += LANES)
            for (long j = 0; j < e; j += LANES) {
                vec row[LANES];
                for (int l = 0; l < LANES; l++)
                    row[l] = first + i + l < t ? *(const vec *)(x + (first + i + l) * stride + j) : (vec){0};
                NAME(turn_tile)(row);
                for (int l = 0; l < LANES; l++) *(vec *)(out + (j + l) * BLOCK + i) = row[l];
            }
}

static void NAME(pack)(long t, long stride, long e, const float *x, float *out) {
    for (long i = 0; i < t; i++) memcpy(out + i * e, x + i * stride, e * sizeof(float));
}

// Scores of keys that a query does not see become -infinity: those above the diagonal, and of other segments.
static void NAME(hide)(long m, float *s, int diagonal, const int *segments, long q, long k) {
    ints lane = NAME(numbers)();
    for (long i = 0; (diagonal || segments) && i < m; i++, s += BLOCK) {
        long count = diagonal ? i + 1 : BLOCK;
        for (long j = 0; segments && j < count; j++) s[j] = segments[k + j] == segments[q + i] ? s[j] : -INFINITY;
        for (long j = i / LANES * LANES; diagonal && j < BLOCK; j += LANES)
            *(vec *)(s + j) = NAME(choose)(lane + (int)j > (int)i, (vec){0} - INFINITY, *(vec *)(s + j));
    }
}

// Whether no query of one block has the segment of a key of the other, as far as is cheaply seen.
static int NAME(apart)(const int *segments, long q, long m, long k, long n) {
    int q_low = segments[q], q_high = q_low, k_low = segments[k], k_high = k_low;
    for (long i = 0; i < m; i++) {
        q_low = segments[q + i] < q_low ? segments[q + i] : q_low;
        q_high = segments[q + i] > q_high ? segments[q + i] : q_high;
    }
    for (long i = 0; i < n; i++) {
        k_low = segments[k + i] < k_low ? segments[k + i] : k_low;
        k_high = segments[k + i] > k_high ? segments[k + i] : k_high;
    }
    return q_low > k_high || q_high < k_low;
}

// Online softmax of a block of scores: they become weights, exp(scale (s - largest so far)); what was summed before is adapted.
// LANES rows at a time: what is to be found across a row, its largest and its sum, is found lane by lane once they are turned.
static void NAME(soften)(long m, long e, float scale, float *s, float *largest, float *sums, float *out) {
    for (long i = 0; i < m; i += LANES, s += LANES * BLOCK) {
        long rows = LEAST(LANES, m - i);
        vec part[LANES] = {0}, *old = (vec *)(largest + i), *sum = (vec *)(sums + i);
        for (long r = 0; r < rows; r++) {
            const vec *row = (const vec *)(s + r * BLOCK);
            part[r] = row[0];
            for (int j = 1; j < BLOCK / LANES; j++) part[r] = LARGER(part[r], row[j]);
        }
        NAME(turn_tile)(part);
        vec top = *old;
        for (int l = 0; l < LANES; l++) top = LARGER(top, part[l]);
        vec base = NAME(choose)(top == (vec){0} - INFINITY, (vec){0}, top);  // -infinity: it sees nothing yet
        vec factor = NAME(exps)((*old - base) * scale);
        for (long r = 0; r < rows; r++) {
            vec *row = (vec *)(s + r * BLOCK), total = {0};
            for (int j = 0; j < BLOCK / LANES; j++) total += row[j] = NAME(exps)((row[j] - base[r]) * scale);
            part[r] = total;
            for (long j = 0; factor[r] != 1.0f && j < e; j += LANES) *(vec *)(out + (i + r) * e + j) *= factor[r];
        }
        NAME(turn_tile)(part);
        *old = top, *sum *= factor;
        for (int l = 0; l < LANES; l++) *sum += part[l];
    }
}

// Floats of scratch memory that the two need.
EXPORT long NAME(attention_scratch)(long t, long e) { return BLOCK * BLOCK + 2 * BLOCK * e + 3 * BLOCK + UP(t, BLOCK) * e; }
EXPORT long NAME(attention_backward_scratch)(long t, long e) { return 2 * BLOCK * BLOCK + t + UP(t, BLOCK) * e * 8; }

// qkv (b, t, (heads + 2 kv_heads) e) -> y (b, t, heads e), lse (b, heads, t). Dao 2023 (arXiv:2307.08691), algorithm 1.
// Work is cut by key/value heads: number n is head n % kv_heads of sequence n / kv_heads; from `first` to before `last`.
EXPORT void NAME(attention)(long first, long last, long t, long heads, long kv_heads, long e, float scale, const float *all_qkv,
                            const int *segments, float *all_y, float *all_lse, float *scratch) {
    long width = (heads + 2 * kv_heads) * e, group = heads / kv_heads;
    float *s = scratch, *out = s + BLOCK * BLOCK, *queries = out + BLOCK * e, *largest = queries + BLOCK * e;
    float *sums = largest + BLOCK, *keys = sums + 2 * BLOCK;
    for (long number = first; number < last; number++) {
        long sequence = number / kv_heads, kv = number % kv_heads;
        const float *qkv = all_qkv + sequence * t * width, *values = qkv + (heads + kv_heads + kv) * e;
        const int *own = segments ? segments + sequence * t : 0;
        float *y = all_y + sequence * t * heads * e, *lse = all_lse + sequence * heads * t;
        NAME(turn)(t, width, e, qkv + (heads + kv) * e, keys);
        for (long head = kv * group; head < (kv + 1) * group; head++)
            for (long q = 0; q < t; q += BLOCK) {
                long m = LEAST(BLOCK, t - q);
                NAME(pack)(m, width, e, qkv + q * width + head * e, queries);
                for (long i = 0; i < BLOCK; i++) largest[i] = -INFINITY, sums[i] = 0;
                memset(out, 0, m * e * sizeof(float));
                for (long k = 0; k <= q; k += BLOCK) {
                    long n = LEAST(BLOCK, t - k);
                    if (own && k < q && NAME(apart)(own, q, m, k, n)) continue;
                    NAME(scores)(m, e, queries, e, keys + k * e, s, k == q);
                    NAME(hide)(m, s, k == q, own, q, k);
                    NAME(soften)(m, e, scale, s, largest, sums, out);
                    NAME(weighted)(m, n, e, s, values + k * width, width, out, e, k == q, 1);
                }
                for (long i = 0; i < m; i++) {
                    float factor = 1 / sums[i], *row = y + (q + i) * heads * e + head * e;
                    #pragma omp simd
                    for (long j = 0; j < e; j++) row[j] = out[i * e + j] * factor;
                    lse[head * t + q + i] = scale * largest[i] + logf(sums[i]);
                }
            }
    }
}

// A block of P = exp(scale S - lse) and dS = P * (dP - D) scale, in place of S and dP; D: row sums of dy * y. Where P is 0 dP may
// be anything.
static void NAME(changes)(long m, float scale, float *s, float *ds, const float *lse, const float *d) {
    for (long i = 0; i < m; i++, s += BLOCK, ds += BLOCK) {
        float norm = lse[i], mean = d[i];
        #pragma omp simd
        for (int j = 0; j < BLOCK; j++) {
            float p = s[j] = NAME(exp)(scale * s[j] - norm);
            ds[j] = p == 0.0f ? 0.0f : p * (ds[j] - mean) * scale;
        }
    }
}

// With P and dS as above:  dV = P' dy,  dQ = dS K,  dK = dS' Q. Same paper, algorithm 2. Cut as the forward pass.
EXPORT void NAME(attention_backward)(long first, long last, long t, long heads, long kv_heads, long e, float scale,
                                     const float *all_dy, const float *all_qkv, const float *all_y, const float *all_lse,
                                     const int *segments, float *all_dqkv, float *scratch) {
    long width = (heads + 2 * kv_heads) * e, group = heads / kv_heads, size = UP(t, BLOCK) * e;
    float *p = scratch, *ds = p + BLOCK * BLOCK, *turned_keys = ds + BLOCK * BLOCK, *turned_values = turned_keys + size;
    float *keys = turned_values + size, *queries = keys + size, *gradients = queries + size, *dq = gradients + size;
    float *dk = dq + size, *dv = dk + size, *d = dv + size;
    for (long number = first; number < last; number++) {
        long sequence = number / kv_heads, kv = number % kv_heads;
        const float *qkv = all_qkv + sequence * t * width, *k_in = qkv + (heads + kv) * e, *v_in = k_in + kv_heads * e;
        const int *own = segments ? segments + sequence * t : 0;
        float *dqkv = all_dqkv + sequence * t * width;
        NAME(turn)(t, width, e, k_in, turned_keys);
        NAME(turn)(t, width, e, v_in, turned_values);
        NAME(pack)(t, width, e, k_in, keys);
        memset(dk, 0, 2 * size * sizeof(float));
        for (long head = kv * group; head < (kv + 1) * group; head++) {
            const float *y = all_y + (sequence * t * heads + head) * e, *dy = all_dy + (sequence * t * heads + head) * e;
            const float *lse = all_lse + (sequence * heads + head) * t;
            NAME(pack)(t, width, e, qkv + head * e, queries);
            NAME(pack)(t, heads * e, e, dy, gradients);
            for (long i = 0; i < t; i++) {
                const float *row = y + i * heads * e;
                float sum = 0;
                #pragma omp simd reduction(+ : sum)
                for (long j = 0; j < e; j++) sum += row[j] * gradients[i * e + j];
                d[i] = sum;
            }
            memset(dq, 0, t * e * sizeof(float));
            for (long k = 0; k < t; k += BLOCK)
                for (long q = k; q < t; q += BLOCK) {
                    long m = LEAST(BLOCK, t - q), n = LEAST(BLOCK, t - k);
                    if (own && k < q && NAME(apart)(own, q, m, k, n)) continue;
                    NAME(scores)(m, e, queries + q * e, e, turned_keys + k * e, p, k == q);
                    NAME(scores)(m, e, gradients + q * e, e, turned_values + k * e, ds, k == q);
                    NAME(hide)(m, p, k == q, own, q, k);
                    NAME(changes)(m, scale, p, ds, lse + q, d + q);
                    NAME(gathered)(m, n, e, p, gradients + q * e, dv + k * e, k == q);
                    NAME(gathered)(m, n, e, ds, queries + q * e, dk + k * e, k == q);
                    NAME(weighted)(m, n, e, ds, keys + k * e, e, dq + q * e, e, k == q, 1);
                }
            for (long i = 0; i < t; i++) memcpy(dqkv + i * width + head * e, dq + i * e, e * sizeof(float));
        }
        for (long i = 0; i < t; i++) {
            memcpy(dqkv + i * width + (heads + kv) * e, dk + i * e, e * sizeof(float));
            memcpy(dqkv + i * width + (heads + kv_heads + kv) * e, dv + i * e, e * sizeof(float));
        }
    }
}
#undef TILE
#undef TILE_
#undef CALL_TILE
#undef CALL_TILE_
#undef UP
#undef LEAST
