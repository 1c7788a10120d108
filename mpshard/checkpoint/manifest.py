"""state.json: where training stood, and a checksum for everything in the directory. No MPI.

A safetensors file is described by its size, the CRC-32 of its header, and for every tensor the ranges that ranks wrote,
`[start, stop, crc32]` in elements. Other files have their size and CRC-32. state.json ends with the CRC-32 of itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpshard import adapters
from mpshard.checkpoint.safetensors_file import INDEX, FormatError, Tensor, parse
from mpshard.config import ConfigError

FORMAT = "mpshard checkpoint 1"
ADAPTER = adapters.WEIGHTS
STATE, OPTIMIZER, SINGLE = "state.json", "optimizer.safetensors", "model.safetensors"

Ranges = dict[str, list[list[int]]]  # tensor: [[start, stop, crc32], ...], in order, without gaps


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used: which file, and why."""


class DamagedError(CheckpointError):
    """A file is missing, truncated or altered: an earlier checkpoint may do."""


@dataclass(frozen=True)
class State:
    """Where training stood.

    Attributes
    ----------
    step: optimizer steps done. position: samples seen, the place in the endless stream of `mpshard.data`.
    random: what random numbers are a function of, beside their own place: seed and step.
    optimizer: the optimizer's counters, and the loss scale of fp16 training.
    tokenizer: its file in this directory, empty if there is none.
    world: ranks that wrote. config: the effective configuration, {"section.key": value}. version: of mpshard.
    files: what each file of the directory must be; see the module's text.
    """

    step: int = 0
    position: int = 0
    random: dict[str, int] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    world: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    version: str = ""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def dumps(self) -> str:
        """The text of state.json."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "crc32": _crc(content)}) + "\n"

    @classmethod
    def loads(cls, text: str, where: str) -> State:
        """Raises DamagedError, which begins with `where`, for a text that is damaged, CheckpointError for another format."""
        try:
            content = json.loads(text)
            expected = content.pop("crc32")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DamagedError(f"{where} is damaged: it is not what mpshard wrote") from None
        if expected != _crc(content):
            raise DamagedError(f"{where} is damaged: its checksum does not fit")
        if content.pop("format") != FORMAT:
            raise CheckpointError(f'{where} is of another version of mpshard; this one reads "{FORMAT}"')
        return cls(**content)


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def describe_data(header: bytes, tensors: Mapping[str, Tensor], ranges: Ranges) -> dict[str, Any]:
    """The record of a safetensors file in `State.files`."""
    size = max((t.stop for t in tensors.values()), default=len(header))
    return {"bytes": size, "header_crc32": zlib.crc32(header), "ranges": ranges}


def describe_text(content: bytes) -> dict[str, Any]:
    """The record of any other file in `State.files`."""
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def in_order(sums: Sequence[tuple[str, int, int, int]]) -> Ranges:
    """Checksums of all ranks, by tensor."""
    ranges: Ranges = {}
    for name, start, stop, crc in sorted(sums):
        ranges.setdefault(name, []).append([start, stop, crc])
    return ranges


@dataclass(frozen=True)
class Store:
    """A directory with weights, its headers read: a checkpoint of ours, or any Hugging Face model directory.

    Attributes
    ----------
    files: for each safetensors file its tensors. state: None where the directory has no state.json.
    """

    directory: Path
    files: dict[str, dict[str, Tensor]]
    state: State | None

    @property
    def weights(self) -> dict[str, tuple[str, Tensor]]:
        """For each weight its file and its place."""
        return {t.name: (file, t) for file, tensors in self.files.items() if file != OPTIMIZER for t in tensors.values()}

    @property
    def optimizer(self) -> dict[str, tuple[str, Tensor]]:
        """The same for the optimizer's tensors."""
        return {t.name: (OPTIMIZER, t) for t in self.files.get(OPTIMIZER, {}).values()}

    @property
    def is_adapter(self) -> bool:
        """Whether it holds adapters alone, without the model that they adapt."""
        return ADAPTER in self.files

    def ranges(self, file: str) -> Ranges:
        """The checksummed ranges of a file; empty where nothing is known."""
        return {} if self.state is None else self.state.files[file]["ranges"]


def open_store(directory: Path) -> Store:
    """Read the headers of a directory and check all that can be checked without reading tensors.

    Raises DamagedError, which names the file that is missing, truncated or altered; CheckpointError if there is no model.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory")
    state = _read_state(directory)
    if state is not None:
        names = [name for name, record in state.files.items() if "ranges" in record]
        for name, record in state.files.items():
            _check(directory / name, record)
    elif (directory / INDEX).exists():
        try:
            names = sorted(set(json.loads((directory / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DamagedError(f"{directory / INDEX} is damaged: it has no weight_map") from None
    elif (directory / SINGLE).exists():
        names = [SINGLE]
    elif (directory / ADAPTER).exists():
        names = [ADAPTER]
    else:
        raise DamagedError(f"{directory} holds no model: neither {SINGLE} nor {INDEX}")
    return Store(directory, {name: read_header(directory / name) for name in names}, state)


def _read_state(directory: Path) -> State | None:
    path = directory / STATE
    if not path.exists():
        if (directory / OPTIMIZER).exists():
            raise DamagedError(f"{path} is missing")
        return None
    return State.loads(path.read_text(encoding="utf-8", errors="replace"), str(path))


def _check(path: Path, record: Mapping[str, Any]) -> None:
    if not path.exists():
        raise DamagedError(f"{path} is missing")
    size = path.stat().st_size
    if size != record["bytes"]:
        what = "truncated" if size < record["bytes"] else "altered"
        raise DamagedError(f"{path} is {what}: {size} bytes, written were {record['bytes']}")
    if "crc32" in record and zlib.crc32(path.read_bytes()) != record["crc32"]:
        raise DamagedError(f"{path} is altered: its checksum does not fit")
    if "header_crc32" in record and zlib.crc32(header_bytes(path)) != record["header_crc32"]:
        raise DamagedError(f"{path} is altered: its header's checksum does not fit")


def header_bytes(path: Path) -> bytes:
    """The length and the header of a safetensors file; no more than the file has."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; DamagedError for one that is missing, truncated or altered."""
    if not path.exists():
        raise DamagedError(f"{path} is missing")
    try:
        with path.open("rb") as file:

            def read(offset: int, size: int) -> bytes:
                file.seek(offset)
                return file.read(size)

            return parse(read, path.stat().st_size)
    except FormatError as error:
        raise DamagedError(f"{path} {error}") from None
