"""The safetensors format: where each tensor's bytes lie. Pure: sizes in, offsets and header bytes out.

A file is 8 bytes (little-endian length n of the header), n bytes of JSON `{name: {dtype, shape, data_offsets}}`, and the
data: every tensor row-major, no gaps. Source: huggingface/safetensors, README, section "Format".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from mpshard.checkpoint.dtypes import SIZES

ALIGN = 64  # bytes: the data begin at a cache line
HEADER_LIMIT = 100_000_000  # bytes, as in the reference implementation: a larger number is no header
INDEX = "model.safetensors.index.json"


class FormatError(ValueError):
    """A file is not what it says: the words after its name."""


@dataclass(frozen=True)
class Tensor:
    """A tensor and its place: bytes [start, stop) of its file."""

    name: str
    dtype: str  # a key of `dtypes.SIZES`
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return SIZES[self.dtype]


Spec = tuple[str, str, tuple[int, ...]]  # name, dtype, shape


def lay_out(specs: Sequence[Spec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, Tensor]]:
    """The first bytes of a file that holds `specs` in this order, and every tensor's place behind them."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    offset, places = 0, []
    for name, dtype, shape in specs:
        stop = offset + prod(shape) * SIZES[dtype]
        if name in entries:
            raise ValueError(f"two tensors are called {name}")
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        places.append((name, dtype, shape, offset, stop))
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)  # spaces, as the format allows
    base = 8 + len(text)
    tensors = {name: Tensor(name, dtype, tuple(shape), base + lo, base + hi) for name, dtype, shape, lo, hi in places}
    return len(text).to_bytes(8, "little") + text, tensors


def parse(read: Callable[[int, int], bytes], file_size: int) -> dict[str, Tensor]:
    """The tensors of a file, in the order of their bytes. read(offset, n) yields n bytes of it.

    Raises FormatError for a truncated or altered file: a header that is none, tensors that do not fill the file.
    """
    if file_size < 8:
        raise FormatError(f"is truncated: {file_size} bytes, no header")
    length = int.from_bytes(read(0, 8), "little")
    if length > HEADER_LIMIT:
        raise FormatError("is not a safetensors file: it does not begin with a header's length")
    if 8 + length > file_size:
        raise FormatError(f"is truncated: {file_size} bytes, its header alone has {8 + length}")
    try:
        entries = json.loads(read(8, length))
        entries.pop("__metadata__", None)
        tensors = [
            Tensor(name, e["dtype"], tuple(int(extent) for extent in e["shape"]), 8 + length + int(e["data_offsets"][0]),
                   8 + length + int(e["data_offsets"][1])) for name, e in entries.items()]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise FormatError(f"has a damaged header ({type(error).__name__}: {error})") from None
    tensors.sort(key=lambda t: (t.start, t.stop))
    _check_places(tensors, 8 + length, file_size)
    return {tensor.name: tensor for tensor in tensors}


def _check_places(tensors: Iterable[Tensor], base: int, file_size: int) -> None:
    end = base
    for tensor in tensors:
        if tensor.dtype not in SIZES:
            raise FormatError(f"holds {tensor.name} in the type {tensor.dtype}, which is not known")
        if min(tensor.shape, default=0) < 0 or tensor.start != end or tensor.stop - end != tensor.size * tensor.itemsize:
            raise FormatError(f"has a damaged header: the bytes of {tensor.name} do not follow or do not fit its shape")
        end = tensor.stop
    if end > file_size:
        raise FormatError(f"is truncated: {file_size} of {end} bytes")
    if end < file_size:
        raise FormatError(f"has {file_size - end} bytes too many behind its last tensor")


def split(specs: Sequence[Spec], limit: int) -> dict[str, list[Spec]]:
    """The files of a model and what each holds, in order: as many tensors as fit `limit` bytes, at least one.

    limit: 0 for one file however large. One file is called model.safetensors, else model-00001-of-000NN.safetensors.
    """
    groups: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        size = prod(spec[2]) * SIZES[spec[1]]
        if limit and groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def index(files: Mapping[str, Sequence[Spec]]) -> dict[str, Any]:
    """The content of model.safetensors.index.json for several files."""
    total = sum(prod(shape) * SIZES[dtype] for specs in files.values() for _, dtype, shape in specs)
    return {"metadata": {"total_size": total}, "weight_map": {spec[0]: file for file, specs in files.items() for spec in specs}}
