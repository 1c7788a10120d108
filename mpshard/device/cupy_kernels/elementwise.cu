// Kernels in which every element is on its own.
#include "numbers.cuh"

// y (rows, d) += bias (d)
KERNEL add_bias(T* y, const T* bias, long long rows, long long d) {
    ROWS(row, rows) columns(d, aligned(y, bias), [&](long long c, auto width) {
        auto out = load(y + row * d + c, width), added = load(bias + c, width);
        EACH(j, width) narrow(widen(out.at[j]) + widen(added.at[j]), out.at[j]);
        save(y + row * d + c, out);
    });
}

// out += x, x of type U
KERNEL add(T* out, const U* x, long long size) {
    every(size, aligned(out, x), [&](long long i, auto width) {
        auto sum = load(out + i, width);
        auto added = load(x + i, width);
        EACH(j, width) narrow((A)(widen(sum.at[j]) + widen(added.at[j])), sum.at[j]);
        save(out + i, sum);
    });
}

// out = x, from T to U
KERNEL cast(const T* x, U* out, long long size) {
    every(size, aligned(x, out), [&](long long i, auto width) {
        auto in = load(x + i, width);
        Piece<U, decltype(width)::value> made;
        EACH(j, width) narrow(widen(in.at[j]), made.at[j]);
        save(out + i, made);
    });
}

// -- activations -----------------------------------------------------------------------------
// The tanh form is x s(w), s(w) = 1 / (1 + exp(-w)), w = x (LINEAR + CUBIC x^2): 0.5 (1 + tanh u) = s(2u).
#define LINEAR ((A)1.5957691216057308)  // 2 sqrt(2 / pi)
#define CUBIC ((A)0.07135481627260025)  // LINEAR * 0.044715

INLINE A logistic(A x) { return 1 / (1 + exponential(-x)); }
INLINE A normal_cdf(A x) { return (A)0.5 * (1 + error_function(x * (A)0.7071067811865476)); }

KERNEL gelu(const T* x, T* y, long long size, bool approximate) {
    every(size, aligned(x, y), [&](long long i, auto width) {
        auto at = load(x + i, width);
        EACH(j, width) {
            A v = widen(at.at[j]);
            narrow(v * (approximate ? logistic(v * (LINEAR + CUBIC * v * v)) : normal_cdf(v)), at.at[j]);
        }
        save(y + i, at);
    });
}

KERNEL gelu_backward(const T* dy, const T* x, T* dx, long long size, bool approximate) {
    every(size, aligned(dy, x, dx), [&](long long i, auto width) {
        auto at = load(x + i, width), g = load(dy + i, width);
        EACH(j, width) {
            A v = widen(at.at[j]), slope;
            if (approximate) {  // s (1 + (1 - s) x w')
                A s = logistic(v * (LINEAR + CUBIC * v * v));
                slope = s * (1 + (1 - s) * v * (LINEAR + 3 * CUBIC * v * v));
            } else {  // Phi + x phi
                slope = normal_cdf(v) + v * (A)0.3989422804014327 * exponential((A)-0.5 * v * v);
            }
            narrow(widen(g.at[j]) * slope, g.at[j]);
        }
        save(dx + i, g);
    });
}

// gate_up (n, 2f) -> y (n, f) = silu(gate) * up
KERNEL swiglu(const T* gate_up, T* y, long long n, long long f) {
    ROWS(row, n) columns(f, aligned(gate_up, y), [&](long long c, auto width) {
        const T* from = gate_up + row * 2 * f + c;
        auto gate = load(from, width), up = load(from + f, width);
        EACH(j, width) {
            A g = widen(gate.at[j]);
            narrow(g * logistic(g) * widen(up.at[j]), up.at[j]);
        }
        save(y + row * f + c, up);
    });
}

KERNEL swiglu_backward(const T* dy, const T* gate_up, T* dx, long long n, long long f) {
    ROWS(row, n) columns(f, aligned(dy, gate_up, dx), [&](long long c, auto width) {
        const T* from = gate_up + row * 2 * f + c;
        T* to = dx + row * 2 * f + c;
        auto gate = load(from, width), up = load(from + f, width), slope = load(dy + row * f + c, width);
        EACH(j, width) {
            A g = widen(gate.at[j]), u = widen(up.at[j]), d = widen(slope.at[j]), s = logistic(g);
            narrow(d * u * s * (1 + g * (1 - s)), gate.at[j]);
            narrow(d * g * s, up.at[j]);
        }
        save(to, gate);
        save(to + f, up);
    });
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
    every(size, aligned(x, y), [&](long long i, auto width) {
        auto at = load(x + i, width);
        EACH(j, width) {
            unsigned word = mix(mix((unsigned)(i + j) ^ (unsigned)a) + (unsigned)b);
            narrow((long long)word >= threshold ? widen(at.at[j]) * (A)gain : (A)0, at.at[j]);
        }
        save(y + i, at);
    });
}

// -- optimizer and sums ----------------------------------------------------------------------
// AdamW as mpshard/device/numpy_update.py writes it: weight -= rate * m / (sqrt(v) + eps'), where rate and eps' hold
// the bias corrections. gradient: U. `copy`, V, if it is not null, gets the new weight: what the next gather sends.
KERNEL adamw(T* weight, const U* gradient, T* moment1, T* moment2, V* copy, long long size, double decay, double rate,
             double beta1, double beta2, double eps, double gradient_scale) {
    every(size, aligned(weight, gradient, moment1, moment2, copy), [&](long long i, auto width) {
        auto w = load(weight + i, width), m = load(moment1 + i, width), v = load(moment2 + i, width);
        auto g = load(gradient + i, width);
        Piece<V, decltype(width)::value> short_w;
        EACH(j, width) {
            A slope = widen(g.at[j]) * (A)gradient_scale;
            A first = widen(m.at[j]) * (A)beta1 + (A)(1 - beta1) * slope;
            A second = widen(v.at[j]) * (A)beta2 + (A)(1 - beta2) * slope * slope;
            A value = widen(w.at[j]) * (A)decay - (A)rate * (first / (root(second) + (A)eps));
            narrow(first, m.at[j]);
            narrow(second, v.at[j]);
            narrow(value, w.at[j]);
            narrow(value, short_w.at[j]);
        }
        save(moment1 + i, m);
        save(moment2 + i, v);
        save(weight + i, w);
        if (copy) save(copy + i, short_w);
    });
}

// out = keep * out + share * x, x of type U; with keep 0 out is not read
KERNEL blend(T* out, const U* x, long long size, double keep, double share) {
    every(size, aligned(out, x), [&](long long i, auto width) {
        auto old = load(out + i, width);
        auto added = load(x + i, width);
        EACH(j, width) {
            A sum = (A)share * (A)widen(added.at[j]);
            if (keep != 0) sum += (A)keep * widen(old.at[j]);
            narrow(sum, old.at[j]);
        }
        save(out + i, old);
    });
}

// x, float, to bf16 words: 16 random bits of element start + i are added below those that stay, the rest is cut off
KERNEL round_at_random(const float* x, bf16* out, long long size, long long start, long long a, long long b) {
    every(size, false, [&](long long i, auto) {
        unsigned word = mix(mix((unsigned)(start + i) ^ (unsigned)a) + (unsigned)b);
        out[i].bits = (unsigned short)((__float_as_uint(x[i]) + (word >> 16)) >> 16);
    });
}

// out (size), T, = or += the sum of parts (count, size), U, as a binary tree: the largest power of two of them below
// count, plus the rest, each likewise. That is a binary counter of partial sums: equal ones are added as they meet.
KERNEL ordered_sum(const U* parts, T* out, long long count, long long size, bool accumulate) {
    every(size, false, [&](long long i, auto) {
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
    });
}
