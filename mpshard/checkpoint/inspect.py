"""What is in a checkpoint or model directory: sizes, shapes, where training stood, and whether every byte is as written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard.checkpoint import load, publish, transfer
from mpshard.checkpoint.manifest import OPTIMIZER, Store
from mpshard.comm.agree import on_root
from mpshard.device import open_device

if TYPE_CHECKING:
    from mpi4py import MPI


def inspect(comm: MPI.Comm, directory: Path, verify: bool = False) -> dict[str, Any]:
    """A description of a directory (of a run directory's latest checkpoint), ready for JSON. Collective.

    verify: read everything, each rank a part, and compare the checksums. `verified` is None where it was not asked for
    or the directory has none.

    Raises ConfigError, on every rank, that names what is missing, truncated or altered.
    """
    store = load.open_on_all(comm, publish.find(directory))
    if verify and store.state is not None:
        verify_all(comm, store)
    found = on_root(comm, lambda: describe(store))
    return found | {"verified": True if verify and store.state is not None else None}


def verify_all(comm: MPI.Comm, store: Store) -> None:
    """Read every checksummed range of every file, the ranges dealt over the ranks. Collective; raises DamagedError."""
    device = open_device("numpy")
    for file, tensors in store.files.items():
        ranges = [(name, start, stop) for name, of_tensor in store.ranges(file).items() for start, stop, _ in of_tensor]
        mine = [transfer.Piece(*r) for r in ranges[comm.rank::comm.size]]
        load.verify(comm, store, file, transfer.read(comm, store.directory / file, tensors, mine, device))


def describe(store: Store) -> dict[str, Any]:
    """The description without reading tensors."""
    config = store.directory / "config.json"
    weights = store.weights
    about: dict[str, Any] = {
        "directory": str(store.directory),
        "model_type": json.loads(config.read_bytes()).get("model_type") if config.exists() else None,
        "parameters": sum(tensor.size for _, tensor in weights.values()),
        "bytes": sum(path.stat().st_size for path in store.directory.iterdir() if path.is_file()),
        "files": {path.name: path.stat().st_size for path in sorted(store.directory.iterdir()) if path.is_file()},
        "tensors": {name: {"shape": list(t.shape), "dtype": t.dtype, "file": file} for name, (file, t) in weights.items()},
        "optimizer_tensors": len(store.files.get(OPTIMIZER, {})),
    }
    if store.state is not None:
        s = store.state
        about |= {"step": s.step, "position": s.position, "world": s.world, "tokenizer": s.tokenizer, "version": s.version}
    return about


def as_text(about: dict[str, Any]) -> str:
    """The description for people; tensors that differ only in numbers in their names share a line."""
    lines = [f"{about['directory']}: {about['model_type']}, {about['parameters']:,} parameters, {_size(about['bytes'])}"]
    if "step" in about:
        lines.append(f"step {about['step']}, {about['position']:,} samples seen, written by {about['world']} ranks "
                     f"of mpshard {about['version']}, tokenizer: {about['tokenizer']}")
    lines += [f"  {_size(size):>10}  {name}" for name, size in about["files"].items()]
    groups: dict[tuple[str, str, str], int] = {}
    for name, tensor in about["tensors"].items():
        shape = " x ".join(map(str, tensor["shape"])) or "scalar"
        group = re.sub(r"(?<=\.)\d+(?=\.)", "*", name), shape, tensor["dtype"]
        groups[group] = groups.get(group, 0) + 1
    width = max((len(name) for name, _, _ in groups), default=0)
    lines += [f"  {count:>4} of  {name:{width}}  {dtype:4}  {shape}" for (name, shape, dtype), count in groups.items()]
    if about["optimizer_tensors"]:
        lines.append(f"  {about['optimizer_tensors']} tensors of optimizer state")
    if about["verified"]:
        lines.append("every checksum fits")
    elif "step" not in about:
        lines.append("no state.json: nothing to verify with, and training cannot be resumed from it")
    return "\n".join(lines)


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
