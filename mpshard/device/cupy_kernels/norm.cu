// Layer norm and RMS norm. One block a row, a row at a time; arithmetic and statistics in A.
//
// Note on the gradients of weight and bias. They are sums over rows, and floating-point sums depend on their order. So
// block i takes rows i, i + gridDim.x, ... and adds them into its own line of `dweights` and `dbiases` (gridDim.x, d);
// `column_sum_finish` adds up the lines in their order. Each thread owns its columns: nothing is atomic.
#include "numbers.cuh"

#define COLUMNS(c, d) for (long long c = threadIdx.x; c < (d); c += blockDim.x)

// x (rows, d) -> y, stats (2, rows): mean and 1 / standard deviation.
KERNEL layer_norm(const T* x, const T* weight, const T* bias, T* y, A* stats, long long rows, long long d, double eps) {
    long long row = blockIdx.x;
    x += row * d, y += row * d;
    A sum = 0, squares = 0;
    COLUMNS(c, d) sum += widen(x[c]);
    A mean = block_sum(sum) / (A)d;
    COLUMNS(c, d) {
        A distance = widen(x[c]) - mean;
        squares += distance * distance;
    }
    A inverse = 1 / root(block_sum(squares) / (A)d + (A)eps);
    COLUMNS(c, d) narrow((widen(x[c]) - mean) * inverse * widen(weight[c]) + widen(bias[c]), y[c]);
    if (threadIdx.x == 0) stats[row] = mean, stats[rows + row] = inverse;
}

// x (rows, d) -> y, stats (rows): 1 / root mean square.
KERNEL rms_norm(const T* x, const T* weight, T* y, A* stats, long long rows, long long d, double eps) {
    long long row = blockIdx.x;
    x += row * d, y += row * d;
    A squares = 0;
    COLUMNS(c, d) squares += widen(x[c]) * widen(x[c]);
    A inverse = 1 / root(block_sum(squares) / (A)d + (A)eps);
    COLUMNS(c, d) narrow(widen(x[c]) * inverse * widen(weight[c]), y[c]);
    if (threadIdx.x == 0) stats[row] = inverse;
}

// With xhat = (x - mean) * inverse and g = dy * weight:  dx = (g - mean(g) - xhat * mean(g * xhat)) * inverse,
// and without `mean(g)` for RMS norm, whose mean is 0. stats as the forward kernels leave them.
INLINE void norm_backward(const T* dy, const T* x, const T* weight, const A* stats, T* dx, A* dweights, A* dbiases,
                          long long rows, long long d, bool centred, bool add) {
    dweights += blockIdx.x * d, dbiases += blockIdx.x * d;
    COLUMNS(c, d) {
        dweights[c] = 0;
        if (centred) dbiases[c] = 0;
    }
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        const T *g = dy + row * d, *in = x + row * d;
        T* out = dx + row * d;
        A mean = centred ? stats[row] : 0, inverse = centred ? stats[rows + row] : stats[row];
        A sum = 0, product = 0;
        COLUMNS(c, d) {
            A slope = widen(g[c]), normal = (widen(in[c]) - mean) * inverse;
            dweights[c] += slope * normal;
            if (centred) dbiases[c] += slope;
            slope *= widen(weight[c]);
            sum += slope;
            product += slope * normal;
        }
        sum = centred ? block_sum(sum) / (A)d : 0;
        product = block_sum(product) / (A)d;
        COLUMNS(c, d) {
            A normal = (widen(in[c]) - mean) * inverse;
            A value = (widen(g[c]) * widen(weight[c]) - sum - normal * product) * inverse;
            narrow(add ? widen(out[c]) + value : value, out[c]);
        }
    }
}

KERNEL layer_norm_backward(const T* dy, const T* x, const T* weight, const A* stats, T* dx, A* dweights, A* dbiases,
                           long long rows, long long d, bool add) {
    norm_backward(dy, x, weight, stats, dx, dweights, dbiases, rows, d, true, add);
}

KERNEL rms_norm_backward(const T* dy, const T* x, const T* weight, const A* stats, T* dx, A* dweights,
                         long long rows, long long d, bool add) {
    norm_backward(dy, x, weight, stats, dx, dweights, dweights, rows, d, false, add);
}
