"""Small models that the tests share: those of the golden files, and their weights put into shards."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.nn import Model
from mpshard.shard import Sharded, shard
from tests.golden import Golden


def golden_model(config: dict[str, Any]) -> Model:
    """The model of a golden file's config.json."""
    if config["model_type"] == "gpt2":
        return gpt2(GPT2Config(vocab_size=config["vocab_size"], max_seq_len=config["n_positions"], n_layers=config["n_layer"],
                               d_model=config["n_embd"], n_heads=config["n_head"]))
    return llama(LlamaConfig(
        vocab_size=config["vocab_size"], max_seq_len=config["max_position_embeddings"], n_layers=config["num_hidden_layers"],
        d_model=config["hidden_size"], n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"],
        d_ff=config["intermediate_size"], tie_embeddings=config["tie_word_embeddings"],
        attention_bias=config["attention_bias"], mlp_bias=config["mlp_bias"]))


def golden_sharded(golden: Golden, comm: Any, **options: Any) -> Sharded:
    """The golden model, sharded, with the golden weights."""
    sharded = shard(golden_model(golden.config), comm, **options)
    sharded.load(lambda name, start, stop: golden.weights[name].ravel()[start:stop])
    return sharded


def gappy_batch(step: int, sequences: int, t: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and targets (sequences, t), a function of the step; two targets in five are not to be learnt."""
    random = np.random.default_rng(step)
    inputs = random.integers(vocabulary, size=(sequences, t))
    return inputs, np.where(random.random((sequences, t)) < 0.6, random.integers(vocabulary, size=(sequences, t)), -100)


def deal(inputs: np.ndarray, targets: np.ndarray, micro: int, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    """(sequences, t) of a step to (micro-batches, micro, t) of one rank: global micro-batch g = m * world + rank."""
    t = inputs.shape[1]
    return tuple(part.reshape(-1, world, micro, t)[:, rank] for part in (inputs, targets))
