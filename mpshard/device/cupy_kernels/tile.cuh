#ifndef TILE_CUH
#define TILE_CUH
// Products of small matrices in shared memory, by tensor cores where the type has them.
//
// Note on who holds what. A block of WARPS warps works on TILE = 16 WARPS rows, a strip of 16 rows a warp. Of a strip's
// product, lane l of the warp holds, in every 8 columns, rows l / 4 and l / 4 + 8 of columns 2 (l % 4) and the one
// after: the layout of mma.m16n8k16's accumulators (PTX ISA, section 9.7.14), which the plain form of the product
// below shares, so that what is done between two products is written once.
#ifndef TILE
#define TILE 32
#endif
#define WARPS (TILE / 16)
#define THREADS (32 * WARPS)

INLINE int lane() { return threadIdx.x % 32; }
INLINE int warp() { return threadIdx.x / 32; }
INLINE int row_of(int i) { return lane() / 4 + i / 2 * 8; }                // in the strip
INLINE int column_of(int j, int i) { return j * 8 + lane() % 4 * 2 + i % 2; }

template <int N> struct Strip {  // 16 rows, N columns
    A at[N / 8][4];
    INLINE void clear() {
        for (int j = 0; j < N / 8; j++)
            for (int i = 0; i < 4; i++) at[j][i] = 0;
    }
};

// -- tensor cores ----------------------------------------------------------------------------
#ifndef HOST_SHIM  // the shim brings its own
#define MMA(NAME)                                                                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME ".f32 {%0,%1,%2,%3}, "           \
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
INLINE void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) { MMA("bf16"); }
INLINE void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], f16) { MMA("f16"); }
#endif

INLINE unsigned pair(const T* low, const T* high) {  // two 16-bit elements as the tensor cores want them
    return *(const unsigned short*)low | (unsigned)*(const unsigned short*)high << 16;
}
INLINE unsigned pair(const T* both) { return *(const unsigned*)both; }

// c (16, N) += a (16, K) b, rows of a `lda` apart; b is (K, N), or if TURNED given as its transpose (N, K).
template <int N, int K, bool TURNED>
INLINE void multiply(Strip<N>& c, const T* a, int lda, const T* b, int ldb) {
    int g = lane() / 4, t = lane() % 4;
    if constexpr (sizeof(T) == 2) {
        for (int k = 0; k < K; k += 16) {
            const T *upper = a + g * lda + k + 2 * t, *lower = upper + 8 * lda;
            unsigned rows[4] = {pair(upper), pair(lower), pair(upper + 8), pair(lower + 8)};
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                unsigned columns[2];
                if constexpr (TURNED) {
                    const T* from = b + (j * 8 + g) * ldb + k + 2 * t;
                    columns[0] = pair(from), columns[1] = pair(from + 8);
                } else {
                    const T* from = b + (k + 2 * t) * ldb + j * 8 + g;
                    columns[0] = pair(from, from + ldb), columns[1] = pair(from + 8 * ldb, from + 9 * ldb);
                }
                mma(c.at[j], rows, columns, T());
            }
        }
    } else {
        for (int k = 0; k < K; k++) {
            A upper = widen(a[g * lda + k]), lower = widen(a[(g + 8) * lda + k]);
#pragma unroll
            for (int j = 0; j < N / 8; j++)
                for (int i = 0; i < 2; i++) {
                    int n = j * 8 + 2 * t + i;
                    A x = widen(TURNED ? b[n * ldb + k] : b[k * ldb + n]);
                    c.at[j][i] += upper * x;
                    c.at[j][2 + i] += lower * x;
                }
        }
    }
}

// -- between memories ------------------------------------------------------------------------
// A tile (TILE, WIDTH) of a matrix in global memory whose rows are `pitch` elements apart: `rows` rows and `width`
// columns of it exist, the rest becomes zero. All threads of the block take part; to be followed by __syncthreads.
template <int WIDTH>
INLINE void load_tile(T* tile, int ld, const T* from, long long pitch, int rows, int width) {
    const int PIECE = 16 / sizeof(T);  // elements of the widest access
    if (width % PIECE == 0 && pitch % PIECE == 0 && (unsigned long long)from % 16 == 0) {
        for (int i = threadIdx.x; i < TILE * (WIDTH / PIECE); i += THREADS) {
            int row = i / (WIDTH / PIECE), c = i % (WIDTH / PIECE) * PIECE;
            uint4 value = {0, 0, 0, 0};
            if (row < rows && c < width) value = *(const uint4*)(from + row * pitch + c);
            *(uint4*)(tile + row * ld + c) = value;
        }
    } else {
        for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) {
            int row = i / WIDTH, c = i % WIDTH;
            if (row < rows && c < width) tile[row * ld + c] = from[row * pitch + c];
            else narrow((A)0, tile[row * ld + c]);
        }
    }
}

// A strip to the warp's own rows of shared memory, for the next product to read.
template <int N> INLINE void keep(const Strip<N>& strip, T* rows, int ld) {
    __syncwarp();  // the last product has read what is overwritten
    for (int j = 0; j < N / 8; j++)
        for (int i = 0; i < 4; i++) narrow(strip.at[j][i], rows[row_of(i) * ld + column_of(j, i)]);
    __syncwarp();
}

// A strip times `factor` (of a row) to global memory; `rows` rows and `width` columns of it exist.
template <int N>
INLINE void store(const Strip<N>& strip, T* to, long long pitch, int rows, int width, A upper, A lower) {
    for (int j = 0; j < N / 8; j++)
        for (int i = 0; i < 4; i++)
            if (row_of(i) < rows && column_of(j, i) < width)
                narrow(strip.at[j][i] * (i < 2 ? upper : lower), to[row_of(i) * pitch + column_of(j, i)]);
}
#endif
