"""The arithmetic of a step, against parameter counts and formulas that others published."""

from __future__ import annotations

from mpshard.bench.work import Product, matrix_parameters, products, step_flops
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama


def test_gpt2_small():
    # "124M" less positions (1024 x 768) and all vectors (norms, biases: 121,344) is what is multiplied; tied head once.
    model = gpt2(GPT2Config(n_layers=12, d_model=768, n_heads=12, vocab_size=50257))
    assert matrix_parameters(model) == 124_439_808 - 1024 * 768 - 121_344


def test_llama_7b():
    # Touvron et al. 2023: 6,738,415,616 parameters, of which the embedding and 65 norms of 4096 are not multiplied.
    model = llama(LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=32000))
    assert matrix_parameters(model) == 6_738_415_616 - 32000 * 4096 - 65 * 4096


def test_flops_are_the_published_ones():
    # PaLM, appendix B: 6 N + 12 L H Q T a token, whose last term counts masked scores, too.
    model = llama(LlamaConfig(n_layers=32, d_model=4096, n_heads=32, d_ff=11008, vocab_size=32000))
    assert step_flops(model, tokens=4096, seq_len=2048) == 4096 * (6 * matrix_parameters(model) + 12 * 32 * 32 * 128 * 2048 // 2)


def test_products_of_a_model_with_grouped_heads():
    model = llama(LlamaConfig(n_layers=3, d_model=64, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=50))
    assert products(model, tokens=10) == {
        Product(10, 64, 128): 3,  # q, k, v in one: 64 + 2 * 32 columns
        Product(10, 64, 64): 3, Product(10, 64, 192): 3, Product(10, 96, 64): 3, Product(10, 64, 50): 1}


def test_the_orientation_of_gpt2s_weights():
    found = products(gpt2(GPT2Config(n_layers=1, d_model=8, n_heads=2, vocab_size=11)), tokens=5)
    assert Product(5, 8, 24, stored_in_out=True) in found and Product(5, 8, 11, stored_in_out=False) in found
