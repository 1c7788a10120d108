"""config.json of every family: what is understood comes back equal, what cannot be computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpshard import config as cfg
from mpshard.checkpoint.hf_config import from_hf, to_hf
from mpshard.checkpoint.names import match
from mpshard.config import ConfigError
from mpshard.families import model_keys, tokenizer_vocab_size
from mpshard.models import LlamaConfig, from_config, llama
from mpshard.models.llama import frequencies

FAMILIES = Path(__file__).parent / "golden" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())


def content(name: str) -> dict:
    return json.loads((FAMILIES / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_written_down_and_read_again(name):
    written = json.loads(json.dumps(to_hf(from_hf(content(name)))))
    assert to_hf(from_hf(written)) == written
    for key in content(name).keys() & {"model_type", "hidden_size", "rope_parameters", "tie_word_embeddings", "head_dim", "n_inner"}:
        assert written[key] == content(name)[key] or (key, name) == ("n_inner", "gpt2_hub")  # null there: 4 d_model


@pytest.mark.parametrize("name", NAMES)
def test_init_from_gives_the_same_model(name):
    config = cfg.load(None, [f"model.init_from={FAMILIES / name}", "data.seq_len=16", "model.dropout=0.1", "data.tokenizer=bytes"])
    cfg.validate(config, world=2)
    ours, theirs = from_config(config.model).config, from_hf(content(name))
    for field in ("vocab_size", "max_seq_len", "n_layers", "d_model", "n_heads", "ff", "tie_embeddings", "norm_eps"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.dropout == 0.1


def test_written_configuration_with_init_from_reads_back(tmp_path):
    config = cfg.load(None, [f"model.init_from={FAMILIES / 'llama3'}", "data.seq_len=16"])
    assert config.data.tokenizer == config.model.init_from
    (tmp_path / "run.toml").write_text(cfg.to_toml(config))
    assert cfg.load(tmp_path / "run.toml") == config


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}


# Llama 3.1's frequencies as transformers 5.24 computes them (_compute_llama3_parameters), every eighth of a head of 128.
def test_llama3_frequencies():
    config = from_hf(content("llama1") | {"head_dim": 128, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
    expected = [1.0, 1.939228e-01, 3.760603e-02, 7.292665e-03, 5.248460e-04, 3.428102e-05, 6.647870e-06, 1.289173e-06]
    np.testing.assert_allclose(frequencies(config)[::8], expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "change", "words"), [
    ("llama1", {"model_type": None}, "model_type is missing"),
    ("llama1", {"model_type": "falcon"}, 'model_type="falcon" is not supported; there are gpt2, llama, mistral, qwen2, qwen3'),
    ("llama1", {"quantization_config": {"bits": 4}}, "quantization_config: quantised weights are not supported"),
    ("llama1", {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported, only "silu"'),
    ("llama1", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling: rope_type="dynamic" is not supported'),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 'rope_parameters: rope_type="yarn" is not supported'),
    ("llama1", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    ("llama1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported, only 1.0"),
    ("llama1", {"hidden_size": None}, "hidden_size is missing"),
    ("llama1", {"hidden_size": "20"}, 'hidden_size="20" must be a whole number'),
    ("llama1", {"tie_word_embeddings": "no"}, 'tie_word_embeddings="no" must be true or false'),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None},
     "use_sliding_window=true is not supported"),
    ("gpt2", {"activation_function": "relu"}, 'activation_function="relu" is not supported'),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not supported"),
])
def test_refused_by_name(name, change, words):
    with pytest.raises(ConfigError) as caught:
        model_keys(content(name) | change, "DIR/config.json")
    assert str(caught.value).startswith("DIR/config.json") and words in str(caught.value)


def test_a_shape_that_contradicts_the_directory_is_refused():
    start = f"model.init_from={FAMILIES / 'mistral'}"
    with pytest.raises(ConfigError, match=r"model.d_model=64 contradicts model.init_from=.*, which has 20; remove it"):
        cfg.load(None, [start, "model.d_model=64"])
    cfg.load(None, [start, "model.d_model=20", "model.d_ff=0"])  # the same, and "derived"
    with pytest.raises(ConfigError, match="data.seq_len=20 is over model.sliding_window=16"):
        cfg.validate(cfg.load(None, [start, "data.seq_len=20", "data.tokenizer=bytes"]), world=1)
    with pytest.raises(ConfigError, match="no file /nowhere/config.json"):
        cfg.load(None, ["model.init_from=/nowhere"])


def test_names_with_and_without_prefix_and_buffers():
    names, ignored = match(["transformer.wte.weight", "transformer.h.0.attn.c_attn.bias"],
                           ["wte.weight", "h.0.attn.c_attn.bias", "h.0.attn.bias", "h.11.attn.masked_bias", "lm_head.weight"])
    assert names == {"transformer.wte.weight": "wte.weight", "transformer.h.0.attn.c_attn.bias": "h.0.attn.c_attn.bias"}
    assert ignored == {"h.0.attn.bias", "h.11.attn.masked_bias", "lm_head.weight"}
    untied = ["model.norm.weight", "lm_head.weight"]
    assert match(untied, [*untied, "model.layers.0.self_attn.bias"]) == ({name: name for name in untied}, set())


def test_qwen_has_biases_in_three_projections_and_norms_of_heads():
    names = [p.name.removeprefix("model.layers.0.") for p in llama(LlamaConfig(arch="qwen2", n_layers=1)).modules[1].parameters]
    assert [n for n in names if n.endswith("bias")] == [f"self_attn.{p}_proj.bias" for p in "qkv"]
    shapes = {p.name: p.shape for p in llama(LlamaConfig(arch="qwen3", n_layers=1, head_dim=96)).modules[1].parameters}
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (96,) and shapes["model.layers.0.self_attn.o_proj.weight"] == (1024, 16 * 96)


def test_vocabulary_of_a_tokenizer_file(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 7}]}))
    assert tokenizer_vocab_size(str(tmp_path)) == tokenizer_vocab_size(str(file)) == 8
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer.json"):
        tokenizer_vocab_size(str(file))
