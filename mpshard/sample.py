"""Generating text from a sharded model. Every rank takes part and gets the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from mpshard.config import ConfigError
from mpshard.nn import Cache
from mpshard.shard import Sharded


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0: the likeliest. top_k 0, top_p 1: no cut.

    Raises ConfigError for values out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, words in (("temperature", 0 <= self.temperature < np.inf, "0 or more"), ("top_k", self.top_k >= 0, "0 or more"),
                                  ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"), ("seed", self.seed >= 0, "0 or more")):
            if not good:
                raise ConfigError(f"{name}={getattr(self, name)} must be {words}")


def draw(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """A token id from logits (v,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores[order[0]])
    if sampling.top_k:
        weights[sampling.top_k:] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:  # keep the smallest set that reaches top_p. Holtzman et al. 2019 (arXiv:1904.09751)
        weights[np.searchsorted(np.cumsum(weights), sampling.top_p) + 1:] = 0
    return int(order[random.choice(len(weights), p=weights / weights.sum())])


def context(sharded: Sharded) -> int:
    """Most positions that the model can look at."""
    config = sharded.model.config
    return min(config.max_seq_len, getattr(config, "sliding_window", 0) or config.max_seq_len)


def generate(sharded: Sharded, prompt: Sequence[int], tokens: int, sampling: Sampling, stop: Collection[int] = (),
             seen: Callable[[int], None] = lambda token: None) -> list[int]:
    """Continue `prompt` (at least one id) by `tokens` ids, or until one of `stop`, which is included. Collective.

    Keys and values of what has been read are kept. When the context is full, its older half is dropped and the newer
    read again. Rank 0 draws for all: the last bits of logits may differ between machines. seen: called with each new id.
    """
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    random, comm, room = np.random.default_rng(sampling.seed), sharded.mesh.comm, context(sharded)
    ids = list(prompt)
    fresh = ids[-room:]
    cache = Cache(min(room, len(fresh) + tokens))
    for _ in range(tokens):
        if cache.length + len(fresh) > cache.capacity:
            fresh, cache = ids[-max(1, room // 2):], Cache(room)
        logits = sharded.logits(np.array([fresh]), cache, last_only=True)
        ids.append(comm.bcast(draw(logits[0, -1], sampling, random) if comm.rank == 0 else None))
        seen(ids[-1])
        if ids[-1] in stop:
            break
        fresh = ids[-1:]
    return ids
