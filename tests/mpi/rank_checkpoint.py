"""Checkpoints written and read by any number of ranks: values, order, bytes read, bytes held, and every way to fail."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import threading
import time
import tracemalloc

import numpy as np
import pytest

from mpshard.checkpoint import (
    CheckpointError,
    Saver,
    State,
    content_of,
    load_model,
    load_training,
    open_on_all,
    publish,
    transfer,
    write,
)
from mpshard.checkpoint.inspect import inspect
from mpshard.checkpoint.manifest import DamagedError
from mpshard.checkpoint.resume import resume
from mpshard.checkpoint.save import optimizer_pieces
from mpshard.comm.files import SharedFile
from mpshard.config import CheckpointConfig, ConfigError
from mpshard.device.base import Kind
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import AdamW
from mpshard.shard import shard
from tests.unprivileged import unprivileged
from tests.where import STAND_IN, here

RANKS = (2, 3, 4)
ON_STAND_IN = (2,)
TIMEOUT = 180
SEQUENCES, T = 12, 9  # of a step
HALF, STEPS = (2, 4) if STAND_IN else (10, 20)  # the stand-in takes its time
MODELS = {
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=101, max_seq_len=T, n_layers=2, d_model=26, n_heads=2, dropout=0.1)),
    "llama": lambda: llama(LlamaConfig(vocab_size=101, max_seq_len=T, n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, dropout=0.1)),
}


class Run:
    """A model in training on `comm`; step k's samples are a function of k."""

    def __init__(self, comm, name="gpt2", seed=3, **options):
        self.comm, self.name = comm, name
        self.sharded = shard(MODELS[name](), comm, seed=seed, **here(), **options)
        self.optim = AdamW(self.sharded, lr=1e-2)

    def train(self, first, last, micro=0):
        """Steps [first, last); their losses. micro: sequences of a micro-batch; 0: one micro-batch a rank."""
        losses = []
        for step in range(first, last):
            samples = np.random.default_rng(step).integers(0, 101, (SEQUENCES, T + 1))
            mine = samples.reshape(-1, self.comm.size, micro or SEQUENCES // self.comm.size, T + 1)[:, self.comm.rank]
            output = self.sharded.step((mine[..., :-1], mine[..., 1:]))
            self.optim.step(output)
            losses.append(output.loss)
        return losses

    def save(self, root, step, keep=0, **options):
        state = State(step=step, position=step * SEQUENCES)
        content = content_of(self.sharded, self.optim, state, **options)
        return write(self.sharded.mesh.comm, root, content, self.sharded.device, keep)

    def load(self, directory):
        return load_training(self.sharded, self.optim, open_on_all(self.comm, directory))

    def everything(self):
        """Weights and optimizer state, whole."""
        units = list(self.sharded.units.values())
        pieces = [piece for _, _, piece in optimizer_pieces(units, self.optim, dict.fromkeys(self.sharded.units, True), saving=False)]
        found = self.sharded.full_weights()
        for of_rank in self.comm.allgather([(p.name, p.start, np.array(self.sharded.device.to_host(p.array))) for p in pieces]):
            found |= {f"{name}[{start}:]": values for name, start, values in of_rank}
        return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(b[name], value, err_msg=name)


def groups(comm):
    """{n: the first n ranks as a communicator, None on the others}."""
    found = {}
    for n in range(1, comm.size + 1):
        part = comm.Split(0 if comm.rank < n else 1, comm.rank)
        found[n] = part if comm.rank < n else None
    return found


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_on_as_many_ranks_is_exact(comm, shared_tmp_path, name, dtype):
    """Losses, weights and moments, bit for bit, after 20 steps with dropout; with weights stored as bfloat16, too."""
    whole = Run(comm, name)
    losses = whole.train(0, STEPS)
    first = Run(comm, name)
    assert first.train(0, HALF) == losses[:HALF]
    directory = first.save(shared_tmp_path / "run", HALF, dtype=dtype, max_shard_bytes=20_000)
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    second = Run(comm, name)
    second.train(0, 3)  # whatever it held is overwritten
    state = second.load(directory)
    assert (state.step, state.position, state.world) == (HALF, HALF * SEQUENCES, comm.size)
    assert second.train(HALF, STEPS) == losses[HALF:]
    assert_same(whole.everything(), second.everything())


def test_resume_on_any_number_of_ranks(comm, shared_tmp_path):
    """All ranks' checkpoint on 1, 2, ... ranks, and theirs on all: the same samples in the same order, losses to 1e-5."""
    parts, (micro, half, end) = groups(comm), (3, 1, 2) if STAND_IN else (1, 3, 6)
    for n, part in parts.items():
        if part is not None:
            run = Run(part)
            run.train(0, half, micro)
            run.save(shared_tmp_path / str(n), half)
    comm.barrier()
    expected = comm.bcast(run.train(half, end, micro))  # of the last, which is all ranks' own, uninterrupted
    for n, m in sorted({(n, comm.size) for n in parts} | {(comm.size, m) for m in parts}):
        if parts[m] is not None:
            run = Run(parts[m])
            assert run.load(publish.find(shared_tmp_path / str(n))).world == n
            np.testing.assert_allclose(run.train(half, end, micro), expected, rtol=1e-5)
        comm.barrier()


def test_weights_arrive_exactly_whatever_the_number_of_ranks(comm, shared_tmp_path):
    parts = groups(comm)
    saved = Run(comm, "llama")
    saved.train(0, 2)
    directory = saved.save(shared_tmp_path / "run", 2)
    weights = saved.sharded.full_weights()
    for part in parts.values():
        if part is not None:
            assert_same(weights, load_model(directory, part, **here()).full_weights())
        comm.barrier()


def test_each_rank_reads_its_own_bytes_and_no_others(comm, shared_tmp_path, monkeypatch):
    run = Run(comm)
    run.train(0, 1)
    directory = run.save(shared_tmp_path / "run", 1)
    reads = []
    original = SharedFile.read_at_all

    def recorded(self, offset, data):
        reads.append((os.path.basename(self.path), offset, data.size))
        return original(self, offset, data)

    monkeypatch.setattr(SharedFile, "read_at_all", recorded)
    monkeypatch.setattr(transfer, "SMALLEST", 1000)  # several reads a file
    monkeypatch.setattr(transfer, "LARGEST", 1000)
    run.load(directory)
    own = sum(s.size for unit in run.sharded.units.values() for s in unit.segments)
    mine = {file: sum(size for name, _, size in reads if name == file) for file in ("model.safetensors", "optimizer.safetensors")}
    assert mine == {"model.safetensors": 4 * own, "optimizer.safetensors": 8 * own}
    spans = sorted((file, offset, offset + size) for of_rank in comm.allgather(reads) for file, offset, size in of_rank if size)
    for (file, _, end), (other, start, _) in zip(spans, spans[1:], strict=False):
        assert other != file or start == end, "two ranks read the same bytes, or nobody reads some"
    assert max(size for _, _, size in reads) <= 1000


def test_saving_and_loading_hold_hardly_more_memory_than_training(comm, shared_tmp_path):
    model = gpt2(GPT2Config(vocab_size=2048, max_seq_len=16, n_layers=4, d_model=128, n_heads=2))
    sharded = shard(model, comm, **here())
    optim = AdamW(sharded)
    memory = sharded.device.memory
    ids = np.zeros((1, 2, 16), np.int64)
    optim.step(sharded.step((ids, ids)))
    training, staged = memory.peak(), memory.current(Kind.STAGING)
    memory.reset_peak()

    def temporaries(action):
        """Bytes of NumPy's and Python's that `action` held at most at once, beyond the pool's; 0 where these are NumPy's, too."""
        if STAND_IN:
            return 0, action()
        gc.collect()
        tracemalloc.start()
        result = action()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak, result

    for dtype in ("fp32", "bf16"):
        state = State(step=1)
        peak, directory = temporaries(lambda dtype=dtype, state=state: write(
            sharded.mesh.comm, shared_tmp_path / dtype, content_of(sharded, optim, state, dtype=dtype), sharded.device))
        assert memory.peak() + peak <= 1.05 * training, (memory.peak(), peak, training)
        memory.reset_peak()
        store = open_on_all(comm, directory)
        peak, _ = temporaries(lambda store=store: load_training(sharded, optim, store))
        assert memory.peak() + peak <= 1.05 * training, (memory.peak(), peak, training)
        assert memory.current(Kind.STAGING) == staged


def test_a_checkpoint_written_behind_the_steps_is_the_state_when_it_began(comm, shared_tmp_path, monkeypatch):
    run, twin = Run(comm), Run(comm)
    root, memory = shared_tmp_path / "run", run.sharded.device.memory
    saver = Saver(root, run.sharded, run.optim, CheckpointConfig(async_=True, keep=0))
    disk, write_own = threading.Event(), transfer.write_own
    monkeypatch.setattr(transfer, "write_own", lambda *args: disk.wait(60) and write_own(*args))
    run.train(0, 2), twin.train(0, 2)
    expected, before, staged = twin.everything(), memory.current(), memory.current(Kind.STAGING)
    saver.save(2, 24)  # returns, although the disk takes nothing yet
    copied = 0 if STAND_IN else 12 * sum(s.size for unit in run.sharded.units.values() for s in unit.segments)  # a GPU's are the host's
    assert memory.current(Kind.STAGING) == staged + copied
    for step in range(2, 5):
        run.train(step, step + 1)
        saver.poll()
    assert publish.candidates(root) == []  # not published before it is whole
    disk.set()
    saver.save(5, 60)  # waits for the one in flight
    assert [publish.step_of(path) for path in publish.candidates(root)] == [2]
    saver.wait()
    assert [publish.step_of(path) for path in publish.candidates(root)] == [5, 2]
    assert memory.current(Kind.STAGING) == staged and memory.current() <= before + (1 << 20)
    twin.load(root / "step-00000002")
    assert_same(expected, twin.everything())
    twin.load(root / "step-00000005")
    assert_same(run.everything(), twin.everything())


def spoiled(directory, file, how):
    path = directory / file
    content = bytearray(path.read_bytes())
    if how == "altered":
        content[-5] ^= 1
    path.write_bytes(content[:-9] if how == "truncated" else content)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("how", ["truncated", "altered"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(comm, shared_tmp_path, file, how):
    run = Run(comm)
    root = shared_tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        run.train(step, step + 1)
        run.save(root, step)
        if step == 1:
            expected = run.everything()
    if comm.rank == 0:
        spoiled(root / "step-00000002", file, how)
    comm.barrier()
    said = []
    # The whole is read by another number of ranks than wrote it, so that checksums have to be joined.
    half = comm.Split(comm.rank % 2, comm.rank)
    with pytest.raises(DamagedError, match=f"step-00000002.{file} is {how}"):
        load_training(*(lambda r: (r.sharded, r.optim))(Run(half)), open_on_all(half, root / "step-00000002"))
    comm.barrier()
    state = resume("auto", root.parent, run.sharded, run.optim, {}, said.append)
    assert state.step == 1
    assert any(file in line and how in line for line in said) and any("step-00000001" in line for line in said)
    assert_same(expected, run.everything())
    with pytest.raises(DamagedError, match=file):
        inspect(comm, root / "step-00000002", verify=True)
    assert inspect(comm, root / "step-00000001", verify=True)["verified"]
    comm.barrier()
    if comm.rank == 0:
        spoiled(root / "step-00000001", file, how)
    comm.barrier()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints can be used"):
        resume("auto", root.parent, run.sharded, run.optim, {}, said.append)


def test_tensors_of_another_model_are_refused_by_name(comm, shared_tmp_path):
    directory = Run(comm).save(shared_tmp_path / "run", 0)
    other = Run(comm, "llama")
    before = other.everything()
    with pytest.raises(CheckpointError, match="lacks .*embed_tokens"):
        other.load(directory)
    assert_same(before, other.everything())


def root_with_one(run, root):
    run.train(0, 1)
    run.save(root, 1)
    run.train(1, 2)


def assert_intact(comm, root):
    comm.barrier()
    assert inspect(comm, root / "latest", verify=True)["step"] == 1
    assert sorted(os.listdir(root)) == ["latest", "step-00000001"]


def test_a_file_system_that_takes_no_more_bytes(comm, shared_tmp_path):
    """On every rank: a limit on the size of files, as a full disk or a quota."""
    run, root = Run(comm), shared_tmp_path / "run"
    root_with_one(run, root)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="safetensors"):
            run.save(root, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_intact(comm, root)
    run.save(root, 2)


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_written(comm, shared_tmp_path, monkeypatch):
    run, root = Run(comm), shared_tmp_path / "run"
    root_with_one(run, root)

    class Full:
        f_bavail, f_frsize = 7, 4096

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Full)
        with pytest.raises(ConfigError, match="no space for a checkpoint of 0.2 MB, 0.0 MB are free"):
            run.save(root, 2)
    assert_intact(comm, root)


@pytest.mark.parametrize(("owner", "name", "asynchronous"), [
    (SharedFile, "write_at_all", False), (SharedFile, "_call", False), (transfer, "read_own", False), (publish, "write_file", False),
    (transfer, "write_own", True), (transfer, "read_own", True), (publish, "write_file", True)])
def test_one_rank_that_fails_stops_all_with_its_words(comm, shared_tmp_path, monkeypatch, owner, name, asynchronous):
    run, root = Run(comm), shared_tmp_path / "run"
    root_with_one(run, root)
    saver = Saver(root, run.sharded, run.optim, CheckpointConfig(async_=asynchronous))
    failing = 0 if owner is publish else comm.size - 1
    if comm.rank == failing:
        original, calls = getattr(owner, name), []

        def fails(*args):
            calls.append(args)
            result = original(*args)
            if len(calls) == 2:
                raise OSError(28, "No space left on device", "somewhere")
            return result

        monkeypatch.setattr(owner, name, fails)
    with pytest.raises(ConfigError, match="somewhere: No space left on device"):
        saver.save(2, 24)
        for step in range(2, 100):
            run.train(step, step + 1)
            saver.poll()
            time.sleep(0.01)
    monkeypatch.undo()
    assert_intact(comm, root)
    saver.save(3, 36)
    saver.wait()
    assert sorted(os.listdir(root)) == ["latest", "step-00000001", "step-00000003"]


def test_a_directory_that_may_not_be_written(comm, shared_tmp_path):
    run = Run(comm)
    (shared_tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file.*Not a directory"):
        run.save(shared_tmp_path / "file" / "checkpoints", 1)


def test_a_read_only_directory(comm, shared_tmp_path):
    run, root = Run(comm), shared_tmp_path / "run"
    root_with_one(run, root)
    if comm.rank == 0:
        root.chmod(0o555)
    comm.barrier()
    try:
        with unprivileged(root), pytest.raises(ConfigError, match="Permission denied"):
            run.save(root, 2)
        assert_intact(comm, root)
    finally:
        comm.barrier()
        if comm.rank == 0:
            root.chmod(0o700)


def test_what_a_directory_says_of_itself(comm, shared_tmp_path):
    run = Run(comm)
    run.save(shared_tmp_path / "run" / "checkpoints", 4)
    about = inspect(comm, shared_tmp_path / "run", verify=True)
    assert (about["step"], about["position"], about["world"], about["model_type"], about["verified"]) == (4, 48, comm.size, "gpt2", True)
    assert about["parameters"] == run.sharded.model.size
    assert about["tensors"]["transformer.h.1.attn.c_attn.weight"] == {
        "shape": [26, 78], "dtype": "F32", "file": "model.safetensors"}
    assert about == json.loads(json.dumps(about))
    if comm.rank == 0:
        shutil.copytree(about["directory"], shared_tmp_path / "foreign")
        for name in ("state.json", "optimizer.safetensors"):
            (shared_tmp_path / "foreign" / name).unlink()
    comm.barrier()
    assert inspect(comm, shared_tmp_path / "foreign", verify=True)["verified"] is None
    with pytest.raises(CheckpointError, match="cannot be resumed"):
        run.load(shared_tmp_path / "foreign")
    assert_same(run.sharded.full_weights(), load_model(shared_tmp_path / "foreign", comm, **here()).full_weights())
