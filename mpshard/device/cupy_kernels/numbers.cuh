#ifndef NUMBERS_CUH
#define NUMBERS_CUH
// Types of the kernels, and what every kernel needs of the language. No header is included: NVRTC then needs no toolkit.
//
// A file is compiled once for each set of types it is used with:
//   T  what most arrays hold: float, f16, bf16 or double
//   U  what the others hold (a gradient, a sum, a table); each kernel says which. V: a third, in adamw alone
//   A  what arithmetic is done in: double for double, else float
// They are chosen by -DT_IS=bf16 and so on.
// Every scalar argument is `long long`, `double` or `bool`: what CuPy makes of Python's int, float and bool.

struct bf16 { unsigned short bits; };  // the upper half of a float
struct f16 { unsigned short bits; };   // IEEE 754 binary16

#ifndef T_IS
#define T_IS float
#endif
#ifndef U_IS
#define U_IS T_IS
#endif
#ifndef V_IS
#define V_IS T_IS
#endif
typedef T_IS T;
typedef U_IS U;
typedef V_IS V;

template <typename S> struct Arithmetic { typedef float type; };
template <> struct Arithmetic<double> { typedef double type; };
typedef Arithmetic<T>::type A;

#define KERNEL extern "C" __global__ void
#define INLINE __device__ __forceinline__
#ifndef HOST_SHIM
#define SHARED_MEMORY(name) extern __shared__ uint4 name[]  // as much as the launch asks for, 16-byte aligned
#endif

// -- to and from arithmetic ------------------------------------------------------------------
INLINE double widen(double x) { return x; }
INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }

INLINE void narrow(double x, double& out) { out = x; }
INLINE void narrow(double x, float& out) { out = (float)x; }
INLINE void narrow(float x, double& out) { out = x; }
INLINE void narrow(float x, float& out) { out = x; }
INLINE void narrow(float x, bf16& out) {  // to the nearest, ties to even; a NaN stays one
    unsigned bits = __float_as_uint(x);
    out.bits = x == x ? (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : (unsigned short)0x7fffu;
}

#if defined(__CUDA_ARCH__)
INLINE float widen(f16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}
INLINE void narrow(float x, f16& out) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x)); }
#elif defined(__HIP_DEVICE_COMPILE__)
INLINE float widen(f16 x) { return (float)__builtin_bit_cast(_Float16, x.bits); }
INLINE void narrow(float x, f16& out) { out.bits = __builtin_bit_cast(unsigned short, (_Float16)x); }
#elif defined(HOST_SHIM)
INLINE float widen(f16 x) { return half_to_float(x.bits); }
INLINE void narrow(float x, f16& out) { out.bits = float_to_half(x); }
#else  // the host's pass of nvcc, which compiles no kernel
INLINE float widen(f16) { return 0; }
INLINE void narrow(float, f16&) {}
#endif
template <typename S> INLINE void narrow(double x, S& out) { narrow((float)x, out); }

// -- functions by precision ------------------------------------------------------------------
INLINE float exponential(float x) { return expf(x); }
INLINE double exponential(double x) { return exp(x); }
INLINE float logarithm(float x) { return logf(x); }
INLINE double logarithm(double x) { return log(x); }
INLINE float root(float x) { return sqrtf(x); }
INLINE double root(double x) { return sqrt(x); }
INLINE float error_function(float x) { return erff(x); }
INLINE double error_function(double x) { return erf(x); }
INLINE A larger(A x, A y) { return x > y ? x : y; }

#define LOWEST (-1e30f)  // below every score; not an infinity, so that differences of two are numbers

// -- walking through arrays ------------------------------------------------------------------
// Memory is fast only with wide accesses, of 16 bytes at most; so where pointers and sizes allow it a thread takes WIDE
// neighbours at a time. A body is written once for both: as a lambda that is told how many elements are its.
#define WIDE (16 / (int)sizeof(T))

template <int N> struct Width { enum { value = N }; };
template <typename S, int N> struct alignas(sizeof(S) * N > 16 ? 16 : sizeof(S) * N) Piece { S at[N]; };

template <typename S, int N> INLINE Piece<S, N> load(const S* from, Width<N>) { return *(const Piece<S, N>*)from; }
template <typename S, int N> INLINE void save(S* to, const Piece<S, N>& piece) { *(Piece<S, N>*)to = piece; }
template <typename... P> INLINE bool aligned(const P*... pointers) { return (((unsigned long long)pointers % 16 == 0) && ...); }
#define EACH(j, width) _Pragma("unroll") for (int j = 0; j < decltype(width)::value; j++)

// Elements 0 ... n - 1, shared by all threads of the grid: f(element, width).
template <typename F> INLINE void every(long long n, bool wide, F f) {
    long long start = (long long)blockIdx.x * blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
    long long pieces = wide ? n / WIDE : 0;
    for (long long i = start; i < pieces; i += step) f(i * WIDE, Width<WIDE>());
    for (long long i = pieces * WIDE + start; i < n; i += step) f(i, Width<1>());
}

// Columns 0 ... d - 1 of a row, shared by the threads of a block: f(column, width). Wide rows must begin on 16 bytes.
template <typename F> INLINE void columns(long long d, bool wide, F f) {
    if (wide && d % WIDE == 0)
        for (long long c = threadIdx.x * WIDE; c < d; c += blockDim.x * WIDE) f(c, Width<WIDE>());
    else
        for (long long c = threadIdx.x; c < d; c += blockDim.x) f(c, Width<1>());
}
#define ROWS(row, rows) for (long long row = blockIdx.x; row < (rows); row += gridDim.x)

// -- sums over a block -----------------------------------------------------------------------
// Every thread gets the total. The order is fixed by the block's size alone. All threads must take part.
template <typename S> INLINE S warp_sum(S value) {
    for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

template <typename S> INLINE S block_sum(S value) {
    __shared__ S parts[32];
    value = warp_sum(value);
    __syncthreads();  // the last call's readers are done
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    S total = parts[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) total += parts[warp];
    return total;
}

INLINE A block_max(A value) {
    __shared__ A parts[32];
    for (int distance = 16; distance; distance /= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, distance));
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    A top = parts[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) top = larger(top, parts[warp]);
    return top;
}
#endif
