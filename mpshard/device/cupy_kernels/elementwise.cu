// Kernels in which every element is on its own. Threads walk through the array together, so reads are contiguous.
#include "numbers.cuh"

// y (rows, d) += bias (d)
KERNEL add_bias(T* y, const T* bias, long long size, long long d) {
    EVERY(i, size) narrow(widen(y[i]) + widen(bias[i % d]), y[i]);
}

// out += x, x of type U
KERNEL add(T* out, const U* x, long long size) {
    EVERY(i, size) narrow((A)(widen(out[i]) + widen(x[i])), out[i]);
}

// out = x, from T to U
KERNEL cast(const T* x, U* out, long long size) {
    EVERY(i, size) narrow(widen(x[i]), out[i]);
}

// -- activations -----------------------------------------------------------------------------
// The tanh form is x s(w), s(w) = 1 / (1 + exp(-w)), w = x (LINEAR + CUBIC x^2): 0.5 (1 + tanh u) = s(2u).
#define LINEAR ((A)1.5957691216057308)  // 2 sqrt(2 / pi)
#define CUBIC ((A)0.07135481627260025)  // LINEAR * 0.044715

INLINE A logistic(A x) { return 1 / (1 + exponential(-x)); }
INLINE A normal_cdf(A x) { return (A)0.5 * (1 + error_function(x * (A)0.7071067811865476)); }

KERNEL gelu(const T* x, T* y, long long size, bool approximate) {
    EVERY(i, size) {
        A v = widen(x[i]);
        narrow(v * (approximate ? logistic(v * (LINEAR + CUBIC * v * v)) : normal_cdf(v)), y[i]);
    }
}

KERNEL gelu_backward(const T* dy, const T* x, T* dx, long long size, bool approximate) {
    EVERY(i, size) {
        A v = widen(x[i]), slope;
        if (approximate) {  // s (1 + (1 - s) x w')
            A s = logistic(v * (LINEAR + CUBIC * v * v));
            slope = s * (1 + (1 - s) * v * (LINEAR + 3 * CUBIC * v * v));
        } else {  // Phi + x phi
            slope = normal_cdf(v) + v * (A)0.3989422804014327 * exponential((A)-0.5 * v * v);
        }
        narrow(widen(dy[i]) * slope, dx[i]);
    }
}

// gate_up (n, 2f) -> y (n, f) = silu(gate) * up; size = n f
KERNEL swiglu(const T* gate_up, T* y, long long size, long long f) {
    EVERY(i, size) {
        long long at = i / f * 2 * f + i % f;
        A gate = widen(gate_up[at]), up = widen(gate_up[at + f]);
        narrow(gate * logistic(gate) * up, y[i]);
    }
}

KERNEL swiglu_backward(const T* dy, const T* gate_up, T* dx, long long size, long long f) {
    EVERY(i, size) {
        long long at = i / f * 2 * f + i % f;
        A gate = widen(gate_up[at]), up = widen(gate_up[at + f]), g = widen(dy[i]), s = logistic(gate);
        narrow(g * up * s * (1 + gate * (1 - s)), dx[at]);
        narrow(g * gate * s, dx[at + f]);
    }
}

// -- dropout ---------------------------------------------------------------------------------
// The generator of mpshard/device/numpy_random.py, word for word; a, b: the key spread for elements below 2^32,
// whose upper half is 0; the host spreads it again for every further 2^32 (start / 2^32).
INLINE unsigned mix(unsigned x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

KERNEL dropout(const T* x, T* y, long long size, long long a, long long b, long long threshold, double gain) {
    EVERY(i, size) {
        unsigned word = mix(mix((unsigned)i ^ (unsigned)a) + (unsigned)b);
        narrow((long long)word >= threshold ? widen(x[i]) * (A)gain : (A)0, y[i]);
    }
}

// -- optimizer and sums ----------------------------------------------------------------------
// AdamW as mpshard/device/numpy_update.py writes it: weight -= rate * m / (sqrt(v) + eps'), where rate and eps' hold
// the bias corrections. gradient: U. `copy`, V, if it is not null, gets the new weight: what the next gather sends.
KERNEL adamw(T* weight, const U* gradient, T* moment1, T* moment2, V* copy, long long size, double decay, double rate,
             double beta1, double beta2, double eps, double gradient_scale) {
    EVERY(i, size) {
        A g = widen(gradient[i]) * (A)gradient_scale;
        A m = widen(moment1[i]) * (A)beta1 + (A)(1 - beta1) * g;
        A v = widen(moment2[i]) * (A)beta2 + (A)(1 - beta2) * g * g;
        A w = widen(weight[i]) * (A)decay - (A)rate * (m / (root(v) + (A)eps));
        narrow(m, moment1[i]);
        narrow(v, moment2[i]);
        narrow(w, weight[i]);
        if (copy) narrow(w, copy[i]);
    }
}

// out (size), T, = or += the sum of parts (count, size), U, as a binary tree: the largest power of two of them below
// count, plus the rest, each likewise. That is a binary counter of partial sums: equal ones are added as they meet.
KERNEL ordered_sum(const U* parts, T* out, long long count, long long size, bool accumulate) {
    EVERY(i, size) {
        A partial[20];
        int depth = 0;
        for (long long part = 0; part < count; part++) {
            A sum = (A)widen(parts[part * size + i]);
            for (long long bits = part; bits & 1; bits >>= 1) sum = partial[--depth] + sum;
            partial[depth++] = sum;
        }
        A sum = partial[--depth];
        while (depth) sum = partial[--depth] + sum;
        narrow(accumulate ? widen(out[i]) + sum : sum, out[i]);
    }
}
