// Numbers of 8 bits with one scale for a matrix or for a block of 128, a power of two. See `Device.matmul_fp8`, `Device.pack_fp8`.
//
// e4m3: 4 bits of exponent, 3 after the point; no infinity, largest 448. e5m2, for gradients: 5 and 2, largest 57344. The
// conversions are written out: only GPUs from sm_89 on have instructions for them, and memory is what these kernels wait for.
#include "numbers.cuh"

struct Format {
    int fraction, bias, top;  // bits after the point; what is added to an exponent; the exponent of the largest number
    unsigned largest;
};
INLINE Format format_of(bool gradient) { return gradient ? Format{2, 15, 15, 0x7bu} : Format{3, 7, 8, 0x7eu}; }

INLINE float power_of_two(int exponent) { return __uint_as_float((unsigned)(exponent + 127) << 23); }

// The exponent of the power of two that brings the largest magnitude, given by its bits, just under 1.75 * 2^top, the largest
// number of either format. At most 120: one over it is an ordinary number too.
INLINE int scale_exponent(unsigned magnitude, Format format) {
    int exponent = format.top + 127 - (int)(magnitude >> 23) - ((magnitude & 0x7fffffu) > 0x600000u);
    return exponent < 120 ? exponent : 120;
}
INLINE float scale_to(unsigned magnitude, Format format) {  // NaN if not finite: then so is every element
    return magnitude < 0x7f800000u ? power_of_two(scale_exponent(magnitude, format)) : __uint_as_float(0x7fffffffu);
}
INLINE float scale_back(unsigned magnitude, Format format) {
    return magnitude < 0x7f800000u ? power_of_two(-scale_exponent(magnitude, format)) : __uint_as_float(0x7fffffffu);
}

// To the nearest, ties to even; what is too large becomes the largest number.
INLINE unsigned char to_8_bits(float x, Format format) {
    unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, code;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (unsigned char)(sign | 0x7fu);
    if (bits < (unsigned)(128 - format.bias) << 23) {  // fewer bits below the smallest exponent: adding what has their unit rounds to it
        unsigned unit = (unsigned)(151 - format.bias - format.fraction) << 23;
        code = __float_as_uint(__uint_as_float(bits) + __uint_as_float(unit)) - unit;
    } else {
        int dropped = 23 - format.fraction;
        code = ((bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1u)) >> dropped) - ((unsigned)(127 - format.bias) << format.fraction);
    }
    return (unsigned char)(sign | (code < format.largest ? code : format.largest));
}

INLINE float from_8_bits(unsigned char code, Format format) {
    unsigned sign = (unsigned)(code & 0x80u) << 24, bits = code & 0x7fu;
    if (bits > format.largest) return __uint_as_float(0x7fffffffu);
    float size = bits >> format.fraction ? __uint_as_float((bits << (23 - format.fraction)) + ((unsigned)(127 - format.bias) << 23))
                                         : (float)bits * power_of_two(1 - format.bias - format.fraction);
    return __uint_as_float(__float_as_uint(size) | sign);
}

// -- the largest magnitude -------------------------------------------------------------------
// largest[0], zero before, = the bits of the largest |x|: without their sign they are in the order of the numbers, NaN on top.
// A maximum is the same in any order.
KERNEL largest_magnitude(const T* x, unsigned* largest, long long size) {
    __shared__ unsigned parts[32];
    unsigned top = 0;
    every(size, aligned(x), [&](long long i, auto width) {
        auto at = load(x + i, width);
        EACH(j, width) {
            unsigned bits = __float_as_uint((float)widen(at.at[j])) & 0x7fffffffu;
            top = bits > top ? bits : top;
        }
    });
    for (int distance = 16; distance; distance /= 2) {
        unsigned other = __shfl_xor_sync(0xffffffffu, top, distance);
        top = other > top ? other : top;
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x) return;
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) top = parts[warp] > top ? parts[warp] : top;
    atomicMax(largest, top);
}

// -- weights on their way --------------------------------------------------------------------
#define BLOCK 128
INLINE int block_exponent(unsigned magnitude) {
    int exponent = scale_exponent(magnitude, format_of(false));
    return magnitude >= 0x7f800000u ? 0 : exponent < -100 ? -100 : exponent > 100 ? 100 : exponent;
}

// words[:n] = x as e4m3, words[n + k] = 127 + the exponent of block k's scale. A warp takes a block.
KERNEL pack_fp8(const T* x, unsigned char* words, long long n) {
    long long block = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32, start = block * BLOCK + threadIdx.x % 32;
    unsigned top = 0;
    for (long long i = start; i < start + BLOCK && i < n; i += 32) {
        unsigned bits = __float_as_uint((float)widen(x[i])) & 0x7fffffffu;
        top = bits > top ? bits : top;
    }
    for (int distance = 16; distance; distance /= 2) {
        unsigned other = __shfl_xor_sync(0xffffffffu, top, distance);
        top = other > top ? other : top;
    }
    int exponent = block_exponent(top);
    float scale = top < 0x7f800000u ? power_of_two(exponent) : __uint_as_float(0x7fffffffu);
    for (long long i = start; i < start + BLOCK && i < n; i += 32)
        words[i] = to_8_bits((float)widen(x[i]) * scale, format_of(false));
    if (threadIdx.x % 32 == 0 && block * BLOCK < n) words[n + block] = (unsigned char)(exponent + 127);
}

// y (slices * n) from the words of so many slices, end to end.
KERNEL unpack_fp8(const unsigned char* words, T* y, long long n, long long size) {
    long long of_slice = n + (n + BLOCK - 1) / BLOCK;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += (long long)gridDim.x * blockDim.x) {
        const unsigned char* slice = words + i / n * of_slice;
        long long at = i % n;
        narrow((A)(from_8_bits(slice[at], format_of(false)) * power_of_two(127 - (int)slice[n + at / BLOCK])), y[i]);
    }
}

// -- rounding --------------------------------------------------------------------------------
// y = x rounded to 8 bits, in its own type again, which holds these numbers; but what is rounded up from just under the type's
// largest number, as float16's 65504 to 65536, overflows.
KERNEL round_to_fp8(const T* x, T* y, const unsigned* largest, long long size, bool gradient) {
    Format format = format_of(gradient);
    float scale = scale_to(largest[0], format), back = scale_back(largest[0], format);
    every(size, aligned(x, y), [&](long long i, auto width) {
        auto at = load(x + i, width);
        EACH(j, width) narrow((A)(from_8_bits(to_8_bits((float)widen(at.at[j]) * scale, format), format) * back), at.at[j]);
        save(y + i, at);
    });
}

// words = the 8 bits of x, and back[0] what they are to be multiplied with.
KERNEL to_fp8(const T* x, unsigned char* words, float* back, const unsigned* largest, long long size, bool gradient) {
    Format format = format_of(gradient);
    float scale = scale_to(largest[0], format);
    if (blockIdx.x == 0 && threadIdx.x == 0) back[0] = scale_back(largest[0], format);
    every(size, aligned(x, words), [&](long long i, auto width) {
        auto at = load(x + i, width);
        Piece<unsigned char, decltype(width)::value> made;
        EACH(j, width) made.at[j] = to_8_bits((float)widen(at.at[j]) * scale, format);
        save(words + i, made);
    });
}

// As to_fp8, words (columns, rows) of x (rows, columns). Blocks of 256 threads turn tiles of SIDE x SIDE.
#define SIDE 64
KERNEL to_fp8_turned(const T* x, unsigned char* words, float* back, const unsigned* largest, long long rows, long long columns,
                     bool gradient) {
    __shared__ unsigned char tile[SIDE][SIDE + 4];  // so that the elements of a column lie in different banks
    Format format = format_of(gradient);
    float scale = scale_to(largest[0], format);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) back[0] = scale_back(largest[0], format);
    int across = threadIdx.x % SIDE, down = threadIdx.x / SIDE, step = blockDim.x / SIDE;
    long long column = (long long)blockIdx.x * SIDE;
    for (long long row = (long long)blockIdx.y * SIDE; row < rows; row += (long long)gridDim.y * SIDE) {
        for (int i = down; i < SIDE; i += step)
            if (row + i < rows && column + across < columns)
                tile[i][across] = to_8_bits((float)widen(x[(row + i) * columns + column + across]) * scale, format);
        __syncthreads();
        for (int i = down; i < SIDE; i += step)
            if (column + i < columns && row + across < rows) words[(column + i) * rows + row + across] = tile[across][i];
        __syncthreads();
    }
}
