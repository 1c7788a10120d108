"""Golden files: what PyTorch and transformers computed for small models (`make_golden.py` makes them).

Note on how near one can come. Between PyTorch's float32 and its float64 over the 20 steps, losses differ by 2e-7
(relative), gradients of step 0 by at most 1.3e-6 of a tensor's largest value, final weights by at most 5e-5 of it.
One exception: the keys' third of GPT-2's `c_attn.bias` [d:2d]. Softmax does not change when all scores of a query
move together, so its true gradient is zero, what is computed is rounding noise, and AdamW, which divides a gradient
by its own size, makes steps of it. Such values are to be left out of comparisons after the first step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NAMES = ("gpt2", "llama", "llama_tied")


@dataclass(frozen=True)
class Golden:
    """One model's run. Fields ending in 64 are the same run in float64. Names are Hugging Face's."""

    config: dict[str, Any]  # the model's config.json
    meta: dict[str, Any]  # versions it was made with, AdamW's settings, the clipping norm
    weights: dict[str, np.ndarray]  # before step 0, float32; tied ones once; GPT-2's matrices are (in, out)
    inputs: np.ndarray  # (steps, sequences, t) int64
    targets: np.ndarray  # (steps, sequences, t) int64, already shifted; -100: not counted
    logits: np.ndarray  # (3, t, vocabulary) of the first sequences of step 0
    logits64: np.ndarray
    gradients: dict[str, np.ndarray]  # of step 0's loss, before clipping
    gradients64: dict[str, np.ndarray]
    losses: np.ndarray  # (steps,) sum of token losses / number of valid tokens of the step
    losses64: np.ndarray
    grad_norms: np.ndarray  # (steps,) over all parameters, before clipping
    grad_norms64: np.ndarray
    finals: dict[str, np.ndarray]  # weights after the last step
    finals64: dict[str, np.ndarray]


def load(name: str) -> Golden:
    """Read the golden file of "gpt2", "llama" or "llama_tied"."""
    with np.load(Path(__file__).parent / f"{name}.npz") as file:
        entries = dict(file)

    def group(kind: str) -> dict[str, np.ndarray]:
        return {key.partition("/")[2]: value for key, value in entries.items() if key.startswith(f"{kind}/")}

    return Golden(
        config=json.loads(entries["config"].item()),
        meta=json.loads(entries["meta"].item()),
        weights=group("weight"),
        gradients=group("gradient"),
        gradients64=group("gradient64"),
        finals=group("final"),
        finals64=group("final64"),
        **{key: entries[key] for key in ("inputs", "targets")},
        **{f"{key}{s}": entries[f"{key}{s}"] for key in ("logits", "losses", "grad_norms") for s in ("", "64")},
    )
