// Matrix products: c (m, n) = or += a (m, k) @ b (k, n), or that and a bias (n), for one core. Included by compiled.c like the
// others, behind vectors.h.
//
// Goto, van de Geijn 2008, "Anatomy of high-performance matrix multiplication": what the innermost loop reads is copied first,
// to the order in which it is read, in panels of ROWS rows of a and of WIDTH columns of b; DEPTH is cut so that a panel of b
// stays in the first-level cache, TALL so that the panels of a stay in the second, WIDE so that those of b take no more memory
// than they need. Copies cost a few percent.
//
// With BF16 defined panels hold bfloat16, two steps of k in a word, and products are of these; sums are float32.

#define WIDTH (COLUMNS * LANES)
#define DEPTH 512
#define TALL 96
#define WIDE 2048
#define AHEAD 32  // floats to prefetch ahead of a transposing copy
#ifdef BF16
#define STEP 2  // steps of k in a word of a panel
#else
#define STEP 1
#endif

#ifdef BF16
// The upper half of each element, to the nearest, ties to even; NaN stays.
INLINE ints NAME(rounded)(vec x) {
    ints bits = (ints)x, nan = x != x, up = bits + 0x7FFF + ((bits >> 16) & 1);
    return ((up & ~nan) | ((bits | 0x400000) & nan)) & (int)0xFFFF0000;
}
INLINE vec NAME(word)(vec even, vec odd) {
    return (vec)((ints)NAME(rounded)(odd) | (((ints)NAME(rounded)(even) >> 16) & 0xFFFF));
}
#endif

// The word of steps i ... of a vector of lines, from the vectors of those steps.
INLINE vec NAME(packed)(const vec *steps) {
#ifdef BF16
    return NAME(word)(steps[0], steps[1]);
#else
    return steps[0];
#endif
}

// LANES lines from `first` on, of LANES steps from i on, of x[line * across + step * along], one of the two 1: a vector a step.
INLINE void NAME(block)(long first, long i, long count, long depth, const float *x, long across, long along, vec *step) {
    int whole = first + LANES <= count && i + LANES <= depth;
    x += first * across + i * along;
    if (whole && along == 1) {
        #pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) {
            step[l] = *(const vec *)(x + l * across);
            __builtin_prefetch(x + l * across + AHEAD);
        }
        NAME(turn_tile)(step);
    } else if (whole) {
        #pragma GCC unroll 16
        for (int s = 0; s < LANES; s++) step[s] = *(const vec *)(x + s * along);
    } else {
        for (int s = 0; s < LANES; s++)
            for (int l = 0; l < LANES; l++) step[s][l] = first + l < count && i + s < depth ? x[l * across + s * along] : 0;
    }
}

// Such blocks to panels of `width` lines: word w of line l of panel p is out[(p * words + w) * width + l]. Zero behind the end.
INLINE void NAME(unload)(long first, long i, long count, long width, long words, const vec *step, float *out) {
    long size = width < LANES ? width : LANES, end = (count + width - 1) / width * width;
    for (long l = 0; l < LANES && first + l < end; l += size) {
        float *to = out + ((first + l) / width * words + i / STEP) * width + (first + l) % width;
        for (long s = 0; s < LANES && i + s < words * STEP; s += STEP, to += width) {
            vec word = NAME(packed)(step + s);
            memcpy(to, (float *)&word + l, size * sizeof(float));
        }
    }
}

// `count` lines of `depth` steps to panels, walking along the step that is 1.
static void NAME(panels)(long count, long width, long depth, const float *x, long across, long along, float *out) {
    long words = (depth + STEP - 1) / STEP, end = (count + width - 1) / width * width;
    vec step[LANES];
    if (along == 1) {
        for (long first = 0; first < end; first += LANES)
            for (long i = 0; i < depth; i += LANES) {
                NAME(block)(first, i, count, depth, x, across, along, step);
                NAME(unload)(first, i, count, width, words, step, out);
            }
    } else {
        for (long i = 0; i < depth; i += LANES)
            for (long first = 0; first < end; first += LANES) {
                NAME(block)(first, i, count, depth, x, across, along, step);
                NAME(unload)(first, i, count, width, words, step, out);
            }
    }
}

INLINE vec NAME(step)(vec sum, const float *a, vec b) {
#ifdef BF16
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(*(const int *)a), (__m512bh)b);
#else
    return sum + *a * b;
#endif
}

// bias: what each column starts from, or null for zero.
INLINE void NAME(product_tile)(long words, const float *a, const float *b, const float *bias, float *c, long c_row, int add) {
    vec sum[ROWS][COLUMNS];
    for (int j = 0; j < COLUMNS; j++) {
        vec start = bias ? *(const vec *)(bias + j * LANES) : (vec){0};
        for (int i = 0; i < ROWS; i++) {
            sum[i][j] = start;
            __builtin_prefetch(c + i * c_row + j * LANES, 1);
        }
    }
    for (long w = 0; w < words; w++, a += ROWS, b += WIDTH) {
        vec right[COLUMNS];
        for (int j = 0; j < COLUMNS; j++) right[j] = *(const vec *)(b + j * LANES);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < COLUMNS; j++) sum[i][j] = NAME(step)(sum[i][j], a + i, right[j]);
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) {
            vec *to = (vec *)(c + i * c_row + j * LANES);
            if (add) sum[i][j] += *to;
            *to = sum[i][j];
        }
}

// Of at most WIDE columns.
static void NAME(product_of)(long m, long n, long k, const float *a, long a_row, long a_k, const float *b, long b_k, long b_n,
                             const float *bias, float *c, long c_row, int add, float *scratch) {
    float *left = scratch, *right = scratch + DEPTH / STEP * (TALL + LANES);
    for (long p = 0; p < k; p += DEPTH, add = 1, bias = 0) {
        long depth = k - p < DEPTH ? k - p : DEPTH, words = (depth + STEP - 1) / STEP;
        NAME(panels)(n, WIDTH, depth, b + p * b_k, b_n, b_k, right);
        for (long i = 0; i < m; i += TALL) {
            long tall = m - i < TALL ? m - i : TALL;
            NAME(panels)(tall, ROWS, depth, a + i * a_row + p * a_k, a_row, a_k, left);
            for (long j = 0; j < n; j += WIDTH)
                for (long r = 0; r < tall; r += ROWS) {
                    float *to = c + (i + r) * c_row + j;
                    if (r + ROWS <= tall && j + WIDTH <= n) {
                        NAME(product_tile)(words, left + r * words, right + j * words, bias ? bias + j : 0, to, c_row, add);
                        continue;
                    }
                    float edge[ROWS * WIDTH];
                    NAME(product_tile)(words, left + r * words, right + j * words, 0, edge, WIDTH, 0);
                    for (long x = 0; x < ROWS && r + x < tall; x++)
                        for (long y = 0; y < WIDTH && j + y < n; y++)
                            to[x * c_row + y] = edge[x * WIDTH + y] + (add ? to[x * c_row + y] : bias ? bias[j + y] : 0);
                }
        }
    }
}

// Floats of scratch memory.
EXPORT long NAME(product_scratch)(long n) {
    return DEPTH / STEP * (TALL + LANES + ((n < WIDE ? n : WIDE) + WIDTH - 1) / WIDTH * WIDTH);
}

// Element (i, p) of a is a[i * a_row + p * a_k], likewise b; of either pair of steps one is 1. Rows of c are c_row apart.
// bias (n), or null: added to every row; not with add.
EXPORT void NAME(product)(long m, long n, long k, const float *a, long a_row, long a_k, const float *b, long b_k, long b_n,
                          const float *bias, float *c, long c_row, int add, float *scratch) {
    for (long j = 0; j < n; j += WIDE)
        NAME(product_of)(m, n - j < WIDE ? n - j : WIDE, k, a, a_row, a_k, b + j * b_n, b_k, b_n, bias ? bias + j : 0, c + j, c_row,
                         add, scratch);
    for (long i = 0; k == 0 && !add && i < m; i++) memset(c + i * c_row, 0, n * sizeof(float));
}

#ifndef BF16
// The same by a BLAS: `sgemm` is its cblas_sgemm, with integers of 64 bits if wide. 101, 111, 112: by rows, as it lies, turned.
EXPORT void NAME(blas_product)(long m, long n, long k, const float *a, long a_row, long a_k, const float *b, long b_k, long b_n,
                               const float *bias, float *c, long c_row, int add, void *sgemm, int wide) {
    int turned_a = a_k != 1, turned_b = b_n != 1;
    long lda = turned_a ? a_k : a_row, ldb = turned_b ? b_n : b_k, least_a = turned_a ? m : k, least_b = turned_b ? k : n;
    if (lda < least_a) lda = least_a;  // of a single line, whose step says nothing
    if (ldb < least_b) ldb = least_b;
    for (long i = 0; bias && i < m; i++) memcpy(c + i * c_row, bias, n * sizeof *c);
    float beta = add || bias ? 1.0f : 0.0f;
    if (k == 0) {
        for (long i = 0; beta == 0 && i < m; i++) memset(c + i * c_row, 0, n * sizeof *c);
        return;
    }
    if (wide)
        ((void (*)(int, int, int, long, long, long, float, const float *, long, const float *, long, float, float *, long))sgemm)(
            101, 111 + turned_a, 111 + turned_b, m, n, k, 1.0f, a, lda, b, ldb, beta, c, c_row < n ? n : c_row);
    else
        ((void (*)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int))sgemm)(
            101, 111 + turned_a, 111 + turned_b, m, n, k, 1.0f, a, lda, b, ldb, beta, c, c_row < n ? n : c_row);
}
#endif
#undef WIDTH
#undef DEPTH
#undef TALL
#undef WIDE
#undef AHEAD
#undef STEP
