// Layer norm and RMS norm. A block works on one row at a time; arithmetic and statistics in A.
//
// Note on the gradients of weight and bias. They are sums over rows, and floating-point sums depend on their order. So
// block i takes rows i, i + gridDim.x, ... and adds them into its own line of `dweights` and `dbiases` (gridDim.x, d);
// `column_sum_finish` adds up the lines in their order. Each thread owns its columns: nothing is atomic.
#include "numbers.cuh"

// x (rows, d) -> y, stats (2, rows): mean and 1 / standard deviation.
KERNEL layer_norm(const T* x, const T* weight, const T* bias, T* y, A* stats, long long rows, long long d, double eps) {
    bool wide = aligned(x, weight, bias, y);
    ROWS(row, rows) {
        const T* in = x + row * d;
        A sum = 0, squares = 0;
        columns(d, wide, [&](long long c, auto width) {
            auto at = load(in + c, width);
            EACH(j, width) sum += widen(at.at[j]);
        });
        A mean = block_sum(sum) / (A)d;
        columns(d, wide, [&](long long c, auto width) {
            auto at = load(in + c, width);
            EACH(j, width) squares += (widen(at.at[j]) - mean) * (widen(at.at[j]) - mean);
        });
        A inverse = 1 / root(block_sum(squares) / (A)d + (A)eps);
        columns(d, wide, [&](long long c, auto width) {
            auto at = load(in + c, width), w = load(weight + c, width), b = load(bias + c, width);
            EACH(j, width) narrow((widen(at.at[j]) - mean) * inverse * widen(w.at[j]) + widen(b.at[j]), at.at[j]);
            save(y + row * d + c, at);
        });
        if (threadIdx.x == 0) stats[row] = mean, stats[rows + row] = inverse;
    }
}

// x (rows, d) -> y, stats (rows): 1 / root mean square.
KERNEL rms_norm(const T* x, const T* weight, T* y, A* stats, long long rows, long long d, double eps) {
    bool wide = aligned(x, weight, y);
    ROWS(row, rows) {
        const T* in = x + row * d;
        A squares = 0;
        columns(d, wide, [&](long long c, auto width) {
            auto at = load(in + c, width);
            EACH(j, width) squares += widen(at.at[j]) * widen(at.at[j]);
        });
        A inverse = 1 / root(block_sum(squares) / (A)d + (A)eps);
        columns(d, wide, [&](long long c, auto width) {
            auto at = load(in + c, width), w = load(weight + c, width);
            EACH(j, width) narrow(widen(at.at[j]) * inverse * widen(w.at[j]), at.at[j]);
            save(y + row * d + c, at);
        });
        if (threadIdx.x == 0) stats[row] = inverse;
    }
}

// With xhat = (x - mean) * inverse and g = dy * weight:  dx = (g - mean(g) - xhat * mean(g * xhat)) * inverse,
// and without `mean(g)` for RMS norm, whose mean is 0. stats as the forward kernels leave them.
INLINE void norm_backward(const T* dy, const T* x, const T* weight, const A* stats, T* dx, A* dweights, A* dbiases,
                          long long rows, long long d, bool centred, bool add) {
    dweights += blockIdx.x * d, dbiases += blockIdx.x * d;
    bool wide = aligned(dy, x, weight, dx, dweights, dbiases), start = true;
    ROWS(row, rows) {
        const T *slopes = dy + row * d, *in = x + row * d;
        T* out = dx + row * d;
        A mean = centred ? stats[row] : 0, inverse = centred ? stats[rows + row] : stats[row];
        A sum = 0, product = 0;
        columns(d, wide, [&](long long c, auto width) {
            auto g = load(slopes + c, width), at = load(in + c, width), w = load(weight + c, width);
            Piece<A, decltype(width)::value> dw = {}, db = {};
            if (!start) dw = load(dweights + c, width);
            if (!start && centred) db = load(dbiases + c, width);
            EACH(j, width) {
                A slope = widen(g.at[j]), normal = (widen(at.at[j]) - mean) * inverse;
                dw.at[j] += slope * normal;
                db.at[j] += slope;
                slope *= widen(w.at[j]);
                sum += slope;
                product += slope * normal;
            }
            save(dweights + c, dw);
            if (centred) save(dbiases + c, db);
        });
        start = false;
        sum = centred ? block_sum(sum) / (A)d : 0;
        product = block_sum(product) / (A)d;
        columns(d, wide, [&](long long c, auto width) {
            auto g = load(slopes + c, width), at = load(in + c, width), w = load(weight + c, width);
            Piece<T, decltype(width)::value> old = {};
            if (add) old = load(out + c, width);
            EACH(j, width) {
                A normal = (widen(at.at[j]) - mean) * inverse;
                A value = (widen(g.at[j]) * widen(w.at[j]) - sum - normal * product) * inverse;
                narrow(add ? widen(old.at[j]) + value : value, at.at[j]);
            }
            save(out + c, at);
        });
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
