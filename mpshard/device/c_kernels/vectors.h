// Vectors of LANES floats. Included by compiled.c once for each set of instructions, before what uses them.
typedef float NAME(vec) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int NAME(ints) __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
#define vec NAME(vec)
#define ints NAME(ints)

// Where the mask's bits are set, that of a, else that of b.
INLINE vec NAME(choose)(ints mask, vec a, vec b) { return (vec)((mask & (ints)a) | (~mask & (ints)b)); }

// 0, 1, 2 ...
INLINE ints NAME(numbers)(void) {
    ints lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    return lane;
}

// LANES vectors turned into their transpose: blocks of 1, 2, 4, ... change places across the diagonal.
INLINE void NAME(turn_tile)(vec *row) {
    #pragma GCC unroll 8
    for (int s = 1; s < LANES; s *= 2) {
        NAME(ints) low, high;
        for (int j = 0; j < LANES; j++) low[j] = j & s ? LANES + j - s : j, high[j] = j & s ? LANES + j : j + s;
        #pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & s)) {
                vec first = row[i], second = row[i + s];
                row[i] = __builtin_shuffle(first, second, low);
                row[i + s] = __builtin_shuffle(first, second, high);
            }
    }
}

// exp of each, as in elementwise.h, for x <= 88.
INLINE vec NAME(exps)(vec x) {
    x = LARGER((vec){0} - 88.0f, x);  // in this order NaN stays
    vec shifted = x * LOG2_E + ROUNDER, n = shifted - ROUNDER;
    return EXP_OF_REST(EXP_REST(x, n)) * (vec)(((ints)shifted - EXP_BIAS) << 23);
}
