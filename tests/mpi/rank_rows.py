"""A table of embeddings that travels by rows: the same training with fewer bytes, whatever else is chosen."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from mpshard.config import ConfigError
from mpshard.device import open_device
from mpshard.models import GPT2Config, LlamaConfig, gpt2, llama
from mpshard.optim import AdamW
from mpshard.plan import plan
from mpshard.shard import shard
from mpshard.shard.options import Options
from mpshard.shard.precision import Precision
from tests.models_small import deal, gappy_batch

RANKS = (2, 3, 4)
T, VOCAB, STEPS = 7, 101, 3
MODELS = {  # of gpt2 the unit has positions beside the table, and rows that two slices share
    "gpt2": lambda: gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=26, n_heads=2, tie_embeddings=False)),
    "llama": lambda: llama(LlamaConfig(vocab_size=VOCAB, max_seq_len=T, n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_ff=40)),
}


def batch(step, world):
    return gappy_batch(step, 4 * world, T, VOCAB)


def train(comm, name, micro, model=None, **options):
    """Losses and norms, weights at the end, the Sharded; not a row that was not asked for may be read: they are NaN."""
    options = {"transport": "mpi", **options}
    sharded = shard(model or MODELS[name](), comm, seed=3, device=open_device("numpy", poison=True), **options)
    optim = AdamW(sharded, lr=1e-2, clip_grad_norm=1.0)
    outputs = []
    for step in range(STEPS):
        outputs.append(sharded.step(deal(*batch(step, comm.size), micro, comm.rank, comm.size)))
        optim.step(outputs[-1])
    sharded.close()
    return [(o.loss, o.grad_norm) for o in outputs], sharded.full_weights(), sharded


@pytest.fixture(scope="module")
def whole(comm):
    """The same without: what `train` returned, made once for each case."""

    @functools.cache
    def made(name, micro, options):
        return train(comm, name, micro, embedding="whole", **dict(options))

    return made


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("micro", "options"), [
    (4, {}), (1, {}), (2, {"prefetch": 3}), (1, {"prefetch": 0, "accumulate": "unsharded"}), (2, {"strategy": "grad_op"}),
    (2, {"strategy": "optim"}), (2, {"strategy": "hybrid", "dp_replicate": 2}), (2, {"reshard_after_forward": False}),
    (2, {"unit": 2}), (2, {"unit": "20kB"}), (2, {"progress": "thread", "prefetch": 2}), (2, {"transport": "auto"}),
    (2, {"precision": Precision(param="bf16", reduce="bf16")}), (2, {"recompute": "block", "reduce": "alltoall"}),
], ids=str)
def test_the_same_training(comm, whole, name, micro, options):
    if options.get("dp_replicate") and comm.size % 2:
        pytest.skip("does not divide the ranks")
    found, weights, sharded = train(comm, name, micro, embedding="rows", **options)
    alike = {"transport": "mpi", **{k: v for k, v in options.items() if k != "progress"}}
    expected, expected_weights, other = whole(name, micro, tuple(alike.items()))
    # The sum over ranks is in their order, MPI's is in an order that MPI chooses: of two numbers it is the same.
    rtol = 0 if comm.size <= 2 else 2e-3 if "precision" in options else 1e-5
    np.testing.assert_allclose(found, expected, rtol=rtol)
    for key, value in expected_weights.items():  # Adam divides by what may be rounding alone
        np.testing.assert_allclose(weights[key], value, rtol=rtol, atol=5 * rtol, err_msg=key)
    if comm.size > 1 and not options.get("dp_replicate"):
        assert sharded.transport.bytes_gathered < other.transport.bytes_gathered
        assert sharded.transport.bytes_reduced < other.transport.bytes_reduced


@pytest.mark.parametrize("micro", [4, 1])
def test_bytes_are_those_of_the_rows_named(comm, micro):
    """Counted by hand from the tokens of the last step; what is planned without them is at least that."""
    if comm.size == 1:
        pytest.skip("nothing travels")
    model = MODELS["llama"]()
    _, _, sharded = train(comm, "llama", micro, model, embedding="rows")
    inputs, _ = deal(*batch(STEPS - 1, comm.size), micro, comm.rank, comm.size)
    unit, counters = sharded.units["embed"], sharded.last.counters
    table = unit.layout.table("model.embed_tokens.weight", comm.size)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    rest = sum(table.slice_size - len(table.whole(rank)) * table.width for rank in others)
    rows = [len([row for row in np.unique(ids) if any(row in table.whole(rank) for rank in others)]) for ids in inputs]
    asked = len(others) * max(-(-len(table.whole(rank)) // 8) for rank in range(comm.size))
    dense = plan(model, Options(transport="mpi"), comm.size, len(inputs))
    embeds = len(others) * unit.layout.shard_size * 4 * len(inputs)
    travelled = sum(rest + number * table.width for number in rows) * 4
    assert counters.bytes_gathered == dense.bytes_gathered - embeds + travelled + asked * len(inputs)
    assert counters.bytes_reduced == dense.bytes_reduced - embeds + travelled
    planned = plan(model, Options(transport="mpi", embedding="rows"), comm.size, len(inputs), tokens=inputs[0].size)
    assert counters.bytes_gathered <= planned.bytes_gathered < dense.bytes_gathered
    assert counters.bytes_reduced <= planned.bytes_reduced < dense.bytes_reduced


def test_evaluation_and_logits(comm):
    of = {}
    for embedding in ("whole", "rows"):
        sharded = shard(MODELS["gpt2"](), comm, seed=3, device=open_device("numpy", poison=True), transport="mpi", embedding=embedding)
        ids, targets = batch(comm.rank, 1)
        of[embedding] = sharded.evaluate([(ids, targets)] * (1 + comm.rank)), sharded.logits(ids)
        sharded.close()
    assert of["rows"][0] == of["whole"][0]
    np.testing.assert_array_equal(of["rows"][1], of["whole"][1])


def test_who_looks_at_units_sees_them_whole(comm):
    """An audited step gathers all of it, and its gradient goes back whole."""
    norms, seen = {}, []
    for embedding in ("whole", "rows"):
        sharded = shard(MODELS["gpt2"](), comm, seed=3, device=open_device("numpy", poison=True), transport="mpi",
                        embedding=embedding, reduce="alltoall")
        for step in range(3):
            sharded.engine.audit((lambda unit, full: seen.append(np.isnan(full[:unit.layout.size]).any())) if step == 1 else None)
            norms[embedding, step] = sharded.step(deal(*batch(step, comm.size), 2, comm.rank, comm.size)).grad_norm
        sharded.close()
    assert seen and not any(seen)
    for step in range(3):
        np.testing.assert_allclose(norms["rows", step], norms["whole", step], rtol=1e-6)


def test_only_what_no_head_reads_and_only_between_nodes(comm):
    tied = gpt2(GPT2Config(vocab_size=VOCAB, max_seq_len=T, n_layers=1, d_model=26, n_heads=2))
    with pytest.raises(ConfigError, match="shard.embedding=rows has no effect: the head reads"):
        shard(tied, comm, embedding="rows")
    for model, options, by_rows in ((tied, {"ranks_on_node": 1}, False), (MODELS["gpt2"](), {}, False),
                                    (MODELS["gpt2"](), {"ranks_on_node": 1}, comm.size > 1),
                                    (MODELS["gpt2"](), {"ranks_on_node": 1, "embedding": "whole"}, False)):
        sharded = shard(model, comm, seed=3, **options)
        assert [name for name, unit in sharded.units.items() if unit.rows is not None] == ["embed"] * by_rows
        sharded.close()
