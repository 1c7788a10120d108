"""Small blocks that are replayed: the same bits as without, whatever else is chosen, and never where it would not be so."""

from __future__ import annotations

import numpy as np
import pytest

from mpshard.autograd import ops
from mpshard.bench import overhead
from mpshard.bench.step import load
from mpshard.device import blas, c_library, open_device
from mpshard.device.blas import set_blas_threads
from mpshard.device.compiled import CompiledDevice
from mpshard.device.replay import Recorder
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import AdamW
from mpshard.shard import shard
from mpshard.shard.precision import Precision
from mpshard.shard.replays import Pass
from mpshard.train import build_model
from tests.models_small import deal, gappy_batch

RANKS = (1, 2)
T, VOCAB, STEPS, LAYERS = 12, 53, 4, 3  # the first step is done as ever, the second recorded
MODELS = {  # heads of 16, which the compiled attention takes
    "gpt2": lambda **more: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=LAYERS, d_model=32, n_heads=2, **more)),
    "llama": lambda **more: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=LAYERS, d_model=64, n_heads=4, n_kv_heads=2,
                                              d_ff=48, **more)),
}
OURS, BLAS = "zen4" in c_library.all_instructions(), blas.sgemm() is not None  # whose products
pytestmark = pytest.mark.skipif(not c_library.all_instructions() or not (OURS or BLAS), reason="products are not C's here")


@pytest.fixture(autouse=True)
def one_core():
    set_blas_threads(1)


def train(comm, model, micro=2, on=True, steps=STEPS, batch=gappy_batch, device=None, **options):
    """Losses, norms and bytes; full weights; what there is of each pass; how many were replayed."""
    sharded = shard(model, comm, seed=3, device=device or open_device("numpy", poison=True), **options)
    sharded.engine.replays.on = on
    optim = AdamW(sharded, lr=1e-2, clip_grad_norm=1.0)
    outputs = []
    for step in range(steps):
        outputs.append(sharded.step(deal(*batch(step, 4 * comm.size, T, VOCAB), micro, comm.rank, comm.size)))
        optim.step(outputs[-1])
    sharded.close()
    found = [(o.loss, o.grad_norm, o.counters.bytes_gathered, o.counters.bytes_reduced) for o in outputs]
    return found, sharded.full_weights(), sharded.engine.replays.passes, sharded.engine.replays.replayed


def check_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name, weight in a[1].items():
        np.testing.assert_array_equal(weight, b[1][name], err_msg=name)
    assert b[3] == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("micro", "options"), [
    (4, {}), (1, {}), (2, {"strategy": "grad_op"}), (2, {"strategy": "optim"}), (1, {"accumulate": "unsharded"}), (2, {"prefetch": 0}),
    (2, {"recompute": "none"}), (2, {"unit": 2}), (2, {"reshard_after_forward": False}), (2, {"transport": "mpi", "prefetch": 2}),
    (2, {"deterministic": True}), (2, {"progress": "thread", "prefetch": 2}), (4, {"precision": Precision(reduce="bf16")}),
], ids=str)
def test_no_bit_is_another(comm, name, micro, options):
    replayed = train(comm, MODELS[name](), micro, **options)
    check_same(replayed, train(comm, MODELS[name](), micro, on=False, **options))
    micro_batches = 4 // micro
    if comm.size > 1 and options.get("transport") == "mpi":  # what this program leaves of backward for later is no pass
        assert replayed[3] == 0
        return
    assert len(replayed[2]) == LAYERS and all(isinstance(found, Pass) for found in replayed[2].values())
    assert replayed[3] == LAYERS * (STEPS * micro_batches - 2)


@pytest.mark.skipif(not BLAS, reason="this BLAS has no cblas_sgemm")
@pytest.mark.parametrize("kernels", ["plain", "avx2"])
def test_products_of_blas_are_replayed(comm, kernels):
    if kernels not in c_library.all_instructions():
        pytest.skip(f"this processor has no {kernels}")
    replayed = train(comm, MODELS["gpt2"](), device=CompiledDevice(poison=True, chosen=kernels))
    check_same(replayed, train(comm, MODELS["gpt2"](), on=False, device=CompiledDevice(poison=True, chosen=kernels)))
    assert replayed[3] == LAYERS * (STEPS * 2 - 2)


def test_shapes_take_turns(comm):
    """Each has its own recordings."""
    def batch(step, sequences, t, vocabulary):
        return gappy_batch(step, sequences, t - 4 * (step % 2), vocabulary)

    replayed = train(comm, MODELS["llama"](), steps=8, batch=batch)
    check_same(replayed, train(comm, MODELS["llama"](), steps=8, batch=batch, on=False))
    assert len(replayed[2]) == 2 * LAYERS and replayed[3] == LAYERS * (8 * 2 - 2 * 2)


def test_packed_documents(comm):
    """Segments are read anew each time, and a pass with them is another than one without."""
    def run(on):
        sharded = shard(MODELS["gpt2"](), comm, seed=3, device=open_device("numpy", poison=True))
        sharded.engine.replays.on = on
        optim, losses = AdamW(sharded, lr=1e-2), []
        for step in range(6):
            inputs, targets = deal(*gappy_batch(step, 4 * comm.size, T, VOCAB), 2, comm.rank, comm.size)
            segments = np.sort(np.random.default_rng((step, comm.rank)).integers(0, 3, inputs.shape), axis=-1)
            optim.step(output := sharded.step((inputs, targets, segments) if step % 2 else (inputs, targets)))
            losses.append(output.loss)
        sharded.close()
        return losses, sharded.engine.replays

    (replayed, replays), (losses, _) = run(True), run(False)
    assert replayed == losses and replays.replayed == LAYERS * (6 * 2 - 2 * 2)


def test_frozen_parts(comm):
    """A block whose first layer learns nothing, and the first one that learns, whose input wants no gradient."""
    def model():
        made = MODELS["gpt2"](tie_embeddings=False)
        for parameter in made.parameters:
            parameter.trainable = ".h.2." in parameter.name or ".h.1.mlp" in parameter.name or "head" in parameter.name
        return made

    replayed = train(comm, model())
    check_same(replayed, train(comm, model(), on=False))
    assert {key[0] for key, found in replayed[2].items() if isinstance(found, Pass)} == {"layers.1", "layers.2"}


@pytest.mark.parametrize(("model", "reason"), [
    (lambda: MODELS["gpt2"](dropout=0.1), "dropout"),
    (lambda: MODELS["llama"](arch="qwen3"), "more than its kernels"),
    (lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=1, d_model=24, n_heads=4)), "more than its kernels"),
], ids=["dropout", "norms of heads", "attention of NumPy"])
def test_what_cannot_be_replayed_is_not(comm, model, reason):
    found = train(comm, model())
    check_same(found, train(comm, model(), on=False))
    assert found[3] == 0 and all(reason in why for why in found[2].values())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_work_beside_the_kernels_is_noticed(comm, monkeypatch, where):
    """NumPy's own, on an array that kernels have written."""
    if where == "forward":
        gelu = ops.gelu

        def louder(tape, *args, **more):
            y = gelu(tape, *args, **more)
            y.data[...] *= 1.5
            return y

        monkeypatch.setattr(ops, "gelu", louder)
    else:
        rule = ops.attention_backward

        def louder(tape, dy, *saved):
            rule(tape, dy * np.float32(1.5), *saved)

        monkeypatch.setattr(ops, "attention_backward", louder)
    found = train(comm, MODELS["gpt2"]())
    check_same(found, train(comm, MODELS["gpt2"](), on=False))
    assert found[3] == 0 and all("more than its kernels" in why or "elsewhere" in why for why in found[2].values())


@pytest.mark.parametrize("field", ["places", "words"])
@pytest.mark.parametrize("where", [0, 1], ids=["forward", "backward"])
def test_a_wrong_recording_is_not_trusted(comm, monkeypatch, where, field):
    """One argument of one call is another: the comparison finds it, and training goes on with the right bits."""
    calls, made_so_far = Recorder._calls, []

    def wrong(self):
        made = calls(self)
        made_so_far.append(made)
        if where == 1 and len(made_so_far) % 2:  # of a pass forward comes first
            return made
        call = made[len(made) // 2]
        number = next(n for n in range(14) if call.places[n] > 0)
        if field == "words":
            call.words[number].integer += 64
        else:
            call.places[number] = 1 if call.places[number] == 2 else 2
        return made

    monkeypatch.setattr(Recorder, "_calls", wrong)
    found = train(comm, MODELS["gpt2"]())
    monkeypatch.setattr(Recorder, "_calls", calls)
    check_same(found, train(comm, MODELS["gpt2"](), on=False))
    assert found[3] == 0 and all("more than its kernels" in why for why in found[2].values())


def test_evaluation_and_sampling_between_steps(comm):
    """They run the same blocks, without a pass backward, and leave no recording behind."""
    def run(on):
        sharded = shard(MODELS["llama"](), comm, seed=3)
        sharded.engine.replays.on = on
        optim, seen = AdamW(sharded, lr=1e-2), []
        for step in range(5):
            pair = deal(*gappy_batch(step, 4 * comm.size, T, VOCAB), 2, comm.rank, comm.size)
            optim.step(output := sharded.step(pair))
            seen += [output.loss, sharded.evaluate([(pair[0][0], pair[1][0])]), sharded.logits(pair[0][0]).tobytes()]
        assert not sharded.engine.replays.under_way
        sharded.close()
        return seen

    assert run(True) == run(False)


@pytest.mark.parametrize("arch", ["gpt2", "llama", "qwen3", "mistral"])
def test_overhead_is_measured_on_the_same_program(comm, arch):
    """`mpshard bench step --overhead`: next to nothing in the same instructions."""
    settings = [f"model.arch={arch}", "model.n_layers=3", "train.micro_batch_size=2", f"train.global_batch_size={4 * comm.size}"]
    config = load(None, settings, comm.size)
    made = [build_model(one, comm)[0] for one in (config, overhead.shrunk(config))]
    programs = [sharded._program(2).program for sharded in made]
    assert programs[0] == programs[1] and len(programs[0]) > 20
    assert made[1].model.size < made[0].model.size / 100


def test_large_blocks_are_not(comm, monkeypatch):
    """Their kernels take so long that it would not matter, and a pass's memory is one piece."""
    monkeypatch.setattr("mpshard.shard.replays.SMALL", 100)
    assert train(comm, MODELS["gpt2"]())[2:] == ({}, 0)


def test_nothing_is_left_after_a_step(comm):
    sharded = shard(MODELS["gpt2"](), comm, seed=3, device=open_device("numpy", poison=True))
    held = []
    for step in range(5):
        sharded.step(deal(*gappy_batch(step, 4 * comm.size, T, VOCAB), 2, comm.rank, comm.size))
        scratch = sharded.engine.replays.scratch  # kept for the next
        held.append(sharded.device.memory.current() - (0 if scratch is None else scratch.nbytes))
    assert len(set(held)) == 1 and sharded.engine.replays.replayed
    sharded.close()
