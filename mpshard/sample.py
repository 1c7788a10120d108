"""Generating text from a sharded model. Every rank takes part and draws the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpshard.shard import Sharded


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0: the likeliest. top_k 0, top_p 1: no cut."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def draw(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """A token id from logits (v,)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores[order[0]])
    weights /= weights.sum()
    if sampling.top_k:
        weights[sampling.top_k:] = 0
    if sampling.top_p < 1:  # keep the smallest set that reaches top_p. Holtzman et al. 2019 (arXiv:1904.09751)
        weights[np.searchsorted(np.cumsum(weights), sampling.top_p) + 1:] = 0
    return int(order[random.choice(len(weights), p=weights / weights.sum())])


def generate(sharded: Sharded, prompt: Sequence[int], tokens: int, sampling: Sampling, window: int, stop: int | None = None) -> list[int]:
    """Continue `prompt` (at least one id) by `tokens` ids, or until `stop`. Collective; the same result on every rank.

    window: most positions the model can look at; older ones are dropped.
    """
    if not prompt:
        raise ValueError("a prompt needs at least one token")
    random = np.random.default_rng(sampling.seed)
    ids = list(prompt)
    for _ in range(tokens):
        logits = sharded.logits(np.array([ids[-window:]]))
        ids.append(draw(logits[0, -1], sampling, random))
        if ids[-1] == stop:
            break
    return ids
