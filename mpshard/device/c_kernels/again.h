// Every kernel that a pass through a block calls, as a function of words: what `replay` can call again. Included by compiled.c
// behind the kernels, once for each set of instructions.
#define CALL(name, ...) EXPORT void NAME(again_##name)(const union word *w) { NAME(name)(__VA_ARGS__); }
#define L(i) w[i].integer
#define F(i) w[i].real
#define P(i) w[i].pointer
#ifndef BF16
CALL(add, L(0), P(1), P(2))
CALL(column_sum, L(0), L(1), P(2), L(3), P(4), P(5))
CALL(gelu, L(0), P(1), P(2))
CALL(gelu_backward, L(0), P(1), P(2), P(3))
CALL(swiglu, L(0), L(1), P(2), P(3))
CALL(swiglu_backward, L(0), L(1), P(2), P(3), P(4))
CALL(layer_norm, L(0), L(1), P(2), P(3), P(4), F(5), P(6), P(7), P(8))
CALL(layer_norm_backward, L(0), L(1), P(2), P(3), P(4), P(5), P(6), L(7), P(8), P(9), P(10), L(11), P(12))
CALL(rms_norm, L(0), L(1), P(2), P(3), F(4), P(5), P(6))
CALL(rms_norm_backward, L(0), L(1), P(2), P(3), P(4), P(5), L(6), P(7), P(8), L(9), P(10))
CALL(rotary, L(0), L(1), L(2), L(3), P(4), P(5), P(6), F(7))
CALL(attention, L(0), L(1), L(2), L(3), L(4), L(5), F(6), P(7), P(8), P(9), P(10), P(11))
CALL(attention_backward, L(0), L(1), L(2), L(3), L(4), L(5), F(6), P(7), P(8), P(9), P(10), P(11), P(12), P(13))
CALL(blas_product, L(0), L(1), L(2), P(3), L(4), L(5), P(6), L(7), L(8), P(9), P(10), L(11), L(12), P(13), L(14))
#endif
CALL(product, L(0), L(1), L(2), P(3), L(4), L(5), P(6), L(7), L(8), P(9), P(10), L(11), L(12), P(13))
#undef CALL
#undef L
#undef F
#undef P
