"""state.json and what it says of the other files: every truncated, altered or missing one is named."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from mpshard.checkpoint.manifest import (
    CheckpointError,
    DamagedError,
    State,
    describe_data,
    describe_text,
    in_order,
    open_store,
)
from mpshard.checkpoint.safetensors_file import lay_out


def make(directory):
    """A checkpoint of one tensor, written without mpshard's writer."""
    header, tensors = lay_out([("w", "F32", (6,))])
    data = np.arange(6, dtype=np.float32).tobytes()
    (directory / "model.safetensors").write_bytes(header + data)
    (directory / "config.json").write_bytes(b"{}")
    sums = [("w", 4, 6, zlib.crc32(data[16:])), ("w", 0, 4, zlib.crc32(data[:16]))]
    files = {"model.safetensors": describe_data(header, tensors, in_order(sums)), "config.json": describe_text(b"{}")}
    state = State(step=3, position=12, world=2, config={"optim.betas": (0.9, 0.95)}, files=files)
    (directory / "state.json").write_text(state.dumps())
    return state


def test_a_state_comes_back(tmp_path):
    state = make(tmp_path)
    store = open_store(tmp_path)
    assert (store.state.step, store.state.position, store.state.world) == (3, 12, 2)
    assert store.ranges("model.safetensors") == {"w": [[0, 4, state.files["model.safetensors"]["ranges"]["w"][0][2]],
                                                        [4, 6, state.files["model.safetensors"]["ranges"]["w"][1][2]]]}
    assert store.weights["w"][1].shape == (6,)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    (lambda d: (d / "config.json").unlink(), "config.json is missing"),
    (lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-3]), "model.safetensors is truncated"),
    (lambda d: (d / "config.json").write_bytes(b"[]"), "config.json is altered"),
    (lambda d: flip(d / "model.safetensors", 20), "model.safetensors is altered: its header"),
    (lambda d: flip(d / "state.json", 50), "state.json is damaged"),
    (lambda d: (d / "state.json").write_text(""), "state.json is damaged"),
    (lambda d: (d / "state.json").write_text((d / "state.json").read_text().replace('"step": 3', '"step": 4')), "state.json is damaged"),
])
def test_what_is_wrong_is_named(tmp_path, spoil, words):
    make(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DamagedError, match=words):
        open_store(tmp_path)


def test_another_format_is_refused(tmp_path):
    content = json.loads(State().dumps())
    content["format"] = "mpshard checkpoint 99"
    content.pop("crc32")
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    with pytest.raises(CheckpointError, match="another version"):
        State.loads(json.dumps(content | {"crc32": crc}), "here")


def test_directories_of_others(tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        open_store(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no model"):
        open_store(tmp_path)
    header, _ = lay_out([("a", "BF16", ())])
    (tmp_path / "part-1.safetensors").write_bytes(header + bytes(2))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}')
    store = open_store(tmp_path)
    assert store.state is None and store.weights["a"][0] == "part-1.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_store(tmp_path)
