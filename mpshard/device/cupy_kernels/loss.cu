// Cross-entropy of a chunk of logits and its gradient, in two passes over each row.
#include "numbers.cuh"

// logits (rows, v), U -> losses (rows) = log sum exp - logit of the target, and, if gradient is not null,
// gradient (rows, v), T, = (softmax - onehot) * scale. It may be the logits' own memory where T is U. Rows whose target
// is `ignore` have loss and gradient 0; a target outside the vocabulary has loss NaN.
KERNEL softmax_loss(const U* logits, const long long* targets, A* losses, T* gradient, long long v, long long ignore,
                    double scale) {
    long long row = blockIdx.x, target = targets[row];
    logits += row * v;
    if (gradient) gradient += row * v;
    if (target == ignore) {
        for (long long c = threadIdx.x; gradient && c < v; c += blockDim.x) narrow((A)0, gradient[c]);
        if (threadIdx.x == 0) losses[row] = 0;
        return;
    }
    A top = LOWEST, sum = 0;  // sum of exp(logit - top), of this thread's columns
    for (long long c = threadIdx.x; c < v; c += blockDim.x) {
        A x = (A)widen(logits[c]);
        if (x > top) {
            sum = sum * exponential(top - x) + 1;
            top = x;
        } else {
            sum += exponential(x - top);
        }
    }
    A highest = block_max(top);
    A whole = block_sum(sum * exponential(top - highest));
    A lse = highest + logarithm(whole);
    bool known = target >= 0 && target < v;
    if (threadIdx.x == 0) losses[row] = known ? lse - (A)widen(logits[target]) : (A)__uint_as_float(0x7fffffffu);
    __syncthreads();  // the target's logit has been read: it may now be overwritten
    for (long long c = threadIdx.x; gradient && c < v; c += blockDim.x) {
        A p = exponential((A)widen(logits[c]) - highest) / whole;
        narrow((c == target ? p - 1 : p) * (A)scale, gradient[c]);
    }
}
