"""Cross-entropy fused with the output projection: logits exist one chunk of tokens at a time."""

from __future__ import annotations

import numpy as np

from mpshard.device.numpy_attention import LARGE, SMALL
from mpshard.device.numpy_fp8 import Fp8Kernels
from mpshard.device.numpy_memory import blocks

CHUNK_BYTES = 16 << 20  # of logits, or as many as there are of CHUNK_TOKENS: small against the activations, and enough tokens
CHUNK_TOKENS = 256  # for the products' full speed, which read the whole table for every chunk


def chunk_tokens(tokens: int, vocabulary: int, d: int, itemsize: int) -> int:
    """How many tokens' logits exist at a time: chunks of equal size, and never more of them than half of the table."""
    most = max(1, CHUNK_BYTES // max(1, vocabulary * itemsize), min(CHUNK_TOKENS, d // 2))
    return -(-tokens // max(1, -(-tokens // most)))


class LossKernels(Fp8Kernels):
    """The loss part of `mpshard.device.base.Device`."""

    def cross_entropy(
        self, x: np.ndarray, table: np.ndarray, targets: np.ndarray, ignore_index: int,
        scale: float, dtable: np.ndarray | None, accumulate: bool, want_dx: bool,
    ) -> tuple[float, np.ndarray | None]:  # fmt: skip
        # With E = exp(logits), l = row sums of E:  d logits = scale / l * (E - l onehot). E is never divided: 1 / l
        # scales the rows of x and of dx instead, which are d wide and not v. The row maximum is subtracted only where
        # the sums show that it was needed (see the note in numpy_attention).
        v, d = table.shape
        dx = self.empty(x.shape, x.dtype) if want_dx else None
        valid = np.flatnonzero(targets != ignore_index)
        if len(valid) < len(targets) and dx is not None:
            dx[targets == ignore_index] = 0
        _check_targets(targets, valid, v)
        step = chunk_tokens(len(valid), v, d, x.itemsize)
        logits = self.empty((step, v), x.dtype)
        packed, scaled = self.empty((2, step, d), x.dtype)
        value = 0.0
        for start in range(0, len(valid), max(1, step)):
            tokens = valid[start:start + step]
            rows = len(tokens)
            first, last = int(tokens[0]), int(tokens[-1])
            here = slice(first, last + 1) if last - first == rows - 1 else None  # consecutive: used where they lie
            inputs = np.take(x, tokens, axis=0, out=packed[:rows], mode="clip") if here is None else x[here]
            e, labels, sums = logits[:rows], targets[tokens], np.empty(rows, x.dtype)
            self.matmul(inputs, table.T, out=e)
            with np.errstate(over="ignore", invalid="ignore"):
                loss = self.exponentials(e, labels, sums, shifted=False)
            if not (sums.min() > SMALL and sums.max() < LARGE):
                self.matmul(inputs, table.T, out=e)
                loss = self.exponentials(e, labels, sums, shifted=True)
            value += loss
            if dx is None and dtable is None:
                continue
            e[np.arange(rows), labels] -= sums
            factor = (scale / sums)[:, None]
            if dtable is not None:
                np.multiply(inputs, factor, out=scaled[:rows])
                self.matmul(e.T, scaled[:rows], out=dtable, accumulate=accumulate)
                accumulate = True
            if dx is not None:
                target = scaled[:rows] if here is None else dx[here]
                self.matmul(e, table, out=target)
                target *= factor
                if here is None:
                    dx[tokens] = target
        if dtable is not None and not accumulate:
            dtable.fill(0)
        return value, dx

    def exponentials(self, logits: np.ndarray, labels: np.ndarray, sums: np.ndarray, shifted: bool) -> float:
        """Turn logits (rows, v) into exp(logits), in place, if `shifted` less the row maximum first.

        sums (rows,) receives the row sums. Returns the sum over rows of log(sum) - logit of the label.
        """
        value, ones = 0.0, np.ones(logits.shape[1], logits.dtype)
        for block in blocks(len(logits), logits.shape[1] * logits.itemsize):
            part = logits[block]
            if shifted:
                part -= part.max(axis=1, keepdims=True)
            at_label = part[np.arange(len(part)), labels[block]]
            np.exp(part, out=part)
            np.matmul(part, ones, out=sums[block])
            value += float(np.sum(np.log(sums[block], dtype=np.float64) - at_label))
        return value


def _check_targets(targets: np.ndarray, valid: np.ndarray, v: int) -> None:
    if len(valid):
        used = targets[valid]
        if used.min() < 0 or used.max() >= v:
            raise IndexError(f"targets from {used.min()} to {used.max()} do not fit a vocabulary of {v}")
