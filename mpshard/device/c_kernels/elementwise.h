// One pass over memory for what NumPy needs a dozen for, over blocks in the cache. Included by compiled.c once for each set of
// instructions. float32 throughout; plain loops, which the compiler turns into vectors (`omp simd`).

// exp(x), relative error 1.6e-7 between -88 and 88; below it is 0, from 88.4 on infinity (the last 0.3 of the range are not needed
// by softmax and its like), NaN stays: see compiled.c.
INLINE float NAME(exp)(float x) {
    x = x < -88.0f ? -88.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = x * LOG2_E + ROUNDER, n = shifted - ROUNDER;
    return EXP_OF_REST(EXP_REST(x, n)) * float_of((bits_of(shifted) - EXP_BIAS) << 23);
}

// -- activations -----------------------------------------------------------------------------
// The tanh form is x / (1 + exp(-w)), w = x (LINEAR + CUBIC x^2).
#define LINEAR 1.5957691216057308f
#define CUBIC (LINEAR * 0.044715f)

EXPORT void NAME(gelu)(long n, const float *x, float *y) {
    #pragma omp simd
    for (long i = 0; i < n; i++) y[i] = x[i] / (1.0f + NAME(exp)(-x[i] * (LINEAR + CUBIC * x[i] * x[i])));
}

EXPORT void NAME(gelu_backward)(long n, const float *dy, const float *x, float *dx) {
    #pragma omp simd
    for (long i = 0; i < n; i++) {
        float square = x[i] * x[i];
        float s = 1.0f / (1.0f + NAME(exp)(-x[i] * (LINEAR + CUBIC * square)));
        dx[i] = dy[i] * (s + x[i] * s * (1.0f - s) * (LINEAR + 3.0f * CUBIC * square));
    }
}

// Rows of 2f: gate, up. silu(gate) * up.
EXPORT void NAME(swiglu)(long n, long f, const float *gate_up, float *y) {
    for (long row = 0; row < n; row++, gate_up += 2 * f, y += f) {
        const float *gate = gate_up, *up = gate_up + f;
        #pragma omp simd
        for (long i = 0; i < f; i++) y[i] = gate[i] / (1.0f + NAME(exp)(-gate[i])) * up[i];
    }
}

EXPORT void NAME(swiglu_backward)(long n, long f, const float *dy, const float *gate_up, float *dx) {
    for (long row = 0; row < n; row++, gate_up += 2 * f, dy += f, dx += 2 * f) {
        const float *gate = gate_up, *up = gate_up + f;
        float *dgate = dx, *dup = dx + f;
        #pragma omp simd
        for (long i = 0; i < f; i++) {
            float s = 1.0f / (1.0f + NAME(exp)(-gate[i]));
            float z = gate[i] * s;
            dup[i] = dy[i] * z;
            dgate[i] = dy[i] * up[i] * (z + s * (1.0f - z));
        }
    }
}

// -- sums ------------------------------------------------------------------------------------
EXPORT void NAME(add)(long n, float *out, const float *x) {
    #pragma omp simd
    for (long i = 0; i < n; i++) out[i] += x[i];
}

EXPORT void NAME(sum_of_two)(long n, const float *a, const float *b, float *out) {
    #pragma omp simd
    for (long i = 0; i < n; i++) out[i] = a[i] + b[i];
}

// out (d) = or += the sum over rows of dy (n, d). Of every 64 rows first, so that the error does not grow with n. part (d): scratch.
EXPORT void NAME(column_sum)(long n, long d, const float *dy, int add, float *out, float *part) {
    if (!n && !add) memset(out, 0, d * sizeof *out);
    for (long row = 0; row < n; row += 64, add = 1) {
        memcpy(part, dy + row * d, d * sizeof *part);
        for (long next = row + 1; next < row + 64 && next < n; next++) {
            #pragma omp simd
            for (long i = 0; i < d; i++) part[i] += dy[next * d + i];
        }
        if (add) NAME(add)(d, out, part);
        else memcpy(out, part, d * sizeof *out);
    }
}

// In double: a square of a float is exact there.
EXPORT double NAME(sum_of_squares)(long n, const float *x) {
    double sum = 0;
    #pragma omp simd reduction(+ : sum)
    for (long i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
}

// -- normalisation ---------------------------------------------------------------------------
EXPORT void NAME(layer_norm)(long n, long d, const float *x, const float *weight, const float *bias, float eps,
                             float *y, float *means, float *inverses) {
    for (long row = 0; row < n; row++, x += d, y += d) {
        float sum = 0, squares = 0;
        #pragma omp simd reduction(+ : sum)
        for (long i = 0; i < d; i++) sum += x[i];
        float mean = sum / d;
        #pragma omp simd reduction(+ : squares)
        for (long i = 0; i < d; i++) squares += (x[i] - mean) * (x[i] - mean);
        float inverse = 1.0f / sqrtf(squares / d + eps);
        means[row] = mean, inverses[row] = inverse;
        #pragma omp simd
        for (long i = 0; i < d; i++) y[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
    }
}

// to (d), where there is one, = or += sums (d).
INLINE void NAME(store)(long d, const float *sums, int add, float *to) {
    if (to && add) NAME(add)(d, to, sums);
    else if (to) memcpy(to, sums, d * sizeof *to);
}

// With c = (x - mean) / std, g = dy * weight:  dx = or += (g - mean(g) - c mean(g c)) / std. dweight, dbias (d), or null: = or
// += sums over these rows; sums (2, d): scratch.
EXPORT void NAME(layer_norm_backward)(long n, long d, const float *dy, const float *x, const float *weight, const float *means,
                                      const float *inverses, int accumulate, float *dweight, float *dbias, float *sums, int add,
                                      float *dx) {
    float *of_weight = sums, *of_bias = sums + d;
    memset(sums, 0, 2 * d * sizeof *sums);
    for (long row = 0; row < n; row++, dy += d, x += d, dx += d) {
        float mean = means[row], inverse = inverses[row], sum = 0, product = 0;
        #pragma omp simd reduction(+ : sum, product)
        for (long i = 0; i < d; i++) {
            float c = (x[i] - mean) * inverse, g = dy[i] * weight[i];
            sum += g;
            product += g * c;
        }
        sum /= d, product /= d;
        if (add) {
            #pragma omp simd
            for (long i = 0; i < d; i++)
                dx[i] += (dy[i] * weight[i] - sum - (x[i] - mean) * inverse * product) * inverse;
        } else {
            #pragma omp simd
            for (long i = 0; i < d; i++)
                dx[i] = (dy[i] * weight[i] - sum - (x[i] - mean) * inverse * product) * inverse;
        }
        #pragma omp simd
        for (long i = 0; i < d; i++) {
            of_weight[i] += dy[i] * ((x[i] - mean) * inverse);
            of_bias[i] += dy[i];
        }
    }
    NAME(store)(d, of_weight, accumulate, dweight);
    NAME(store)(d, of_bias, accumulate, dbias);
}

EXPORT void NAME(rms_norm)(long n, long d, const float *x, const float *weight, float eps, float *y, float *inverses) {
    for (long row = 0; row < n; row++, x += d, y += d) {
        float squares = 0;
        #pragma omp simd reduction(+ : squares)
        for (long i = 0; i < d; i++) squares += x[i] * x[i];
        float inverse = inverses[row] = 1.0f / sqrtf(squares / d + eps);
        #pragma omp simd
        for (long i = 0; i < d; i++) y[i] = x[i] * inverse * weight[i];
    }
}

// sums (d): scratch.
EXPORT void NAME(rms_norm_backward)(long n, long d, const float *dy, const float *x, const float *weight, const float *inverses,
                                    int accumulate, float *dweight, float *sums, int add, float *dx) {
    memset(sums, 0, d * sizeof *sums);
    for (long row = 0; row < n; row++, dy += d, x += d, dx += d) {
        float inverse = inverses[row], product = 0;
        #pragma omp simd reduction(+ : product)
        for (long i = 0; i < d; i++) product += dy[i] * weight[i] * x[i];
        product *= inverse * inverse / d;
        if (add) {
            #pragma omp simd
            for (long i = 0; i < d; i++) dx[i] += (dy[i] * weight[i] - x[i] * product) * inverse;
        } else {
            #pragma omp simd
            for (long i = 0; i < d; i++) dx[i] = (dy[i] * weight[i] - x[i] * product) * inverse;
        }
        #pragma omp simd
        for (long i = 0; i < d; i++) sums[i] += dy[i] * x[i] * inverse;
    }
    NAME(store)(d, sums, accumulate, dweight);
}

// -- loss ------------------------------------------------------------------------------------
// Rows of v logits become exp(logit - largest), sums their sums; returns the sum over rows of log(sum) - (label's - largest).
EXPORT double NAME(exponentials)(long n, long v, float *logits, const long long *labels, float *sums) {
    double value = 0;
    for (long row = 0; row < n; row++, logits += v) {
        float largest = logits[0], sum = 0, label = logits[labels[row]];
        #pragma omp simd reduction(max : largest)
        for (long i = 0; i < v; i++) largest = logits[i] > largest ? logits[i] : largest;
        #pragma omp simd reduction(+ : sum)
        for (long i = 0; i < v; i++) {
            logits[i] = NAME(exp)(logits[i] - largest);
            sum += logits[i];
        }
        sums[row] = sum;
        value += log(sum) - (label - largest);
    }
    return value;
}

// -- optimizer -------------------------------------------------------------------------------
// See NumPy's. first = (1 - beta1) * scale, second = sqrt(1 - beta2) * scale, keep = 1 - lr * decay.
EXPORT void NAME(adamw)(long n, float *weight, const float *gradient, float *moment1, float *moment2, float beta1, float beta2,
                        float first, float second, float eps, float rate, float keep) {
    #pragma omp simd
    for (long i = 0; i < n; i++) {
        float g = gradient[i] * second;
        float m = moment1[i] = moment1[i] * beta1 + gradient[i] * first;
        float v = moment2[i] = moment2[i] * beta2 + g * g;
        weight[i] = weight[i] * keep - rate * (m / (sqrtf(v) + eps));
    }
}

// -- formats and random numbers --------------------------------------------------------------
// To the nearest, ties to even; NaN stays.
EXPORT void NAME(to_bf16)(long n, const float *x, unsigned short *y) {
    #pragma omp simd
    for (long i = 0; i < n; i++) {
        unsigned bits = (unsigned)bits_of(x[i]);
        unsigned rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
        y[i] = (unsigned short)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
    }
}

EXPORT void NAME(from_bf16)(long n, const unsigned short *x, float *y) {
    #pragma omp simd
    for (long i = 0; i < n; i++) y[i] = float_of((int)((unsigned)x[i] << 16));
}

INLINE unsigned NAME(mix)(unsigned x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// The words of elements first ... (see numpy_random); the range does not cross a multiple of 2^32.
EXPORT void NAME(dropout)(long n, const float *x, unsigned first, unsigned a, unsigned b, unsigned threshold, float gain, float *y) {
    #pragma omp simd
    for (long i = 0; i < n; i++) {
        unsigned word = NAME(mix)(NAME(mix)((first + (unsigned)i) ^ a) + b);
        y[i] = word >= threshold ? x[i] * gain : x[i] * 0.0f;
    }
}

// Heads of 2 * half elements at x, turned by a row's angles: [first cos - second sin, second cos + first sin].
EXPORT void NAME(rotary)(long n, long stride, long heads, long half, float *x, const float *cosines, const float *sines, float sign) {
    for (long row = 0; row < n; row++, x += stride, cosines += half, sines += half)
        for (long head = 0; head < heads; head++) {
            float *first = x + head * 2 * half, *second = first + half;
            #pragma omp simd
            for (long i = 0; i < half; i++) {
                float u = first[i], w = second[i], sine = sign * sines[i];
                first[i] = u * cosines[i] - w * sine;
                second[i] = w * cosines[i] + u * sine;
            }
        }
}
