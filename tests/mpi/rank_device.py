"""Training on the stand-in for CuPy, through device memory and through pinned memory; whole golden runs are rank_golden's.

Whatever is read before it is there is NaN here (see tests/device/lazy_cupy.py), so a missing wait shows as a wrong loss.
"""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from mpshard.comm import staged
from mpshard.config import ConfigError
from mpshard.device import Kind, open_device
from mpshard.optim import AdamW
from mpshard.plan import plan
from mpshard.shard.precision import DTYPES, Precision
from mpshard.shard.schedule import Finish, Reduce
from tests import golden
from tests.device import cuda_on_cpu, lazy_cupy, lazy_nvidia
from tests.models_small import deal, golden_sharded

RANKS = (2, 3)  # one is for rank_offload
TIMEOUT = 300
pytestmark = [pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value"),  # of the stand-in's products, as a GPU's are
              pytest.mark.skipif(cuda_on_cpu.missing() is not None, reason=str(cuda_on_cpu.missing()))]


@pytest.fixture(params=["mpi", "staged"])
def transport(request, comm):
    if comm.size == 1 and request.param == "staged":
        pytest.skip("one rank sends nothing")
    return request.param


@pytest.fixture
def device():
    with lazy_cupy.installed():
        yield open_device("cupy", poison=True)


def run(name, comm, device, steps, micro=1, scale=1.0, **options):
    reference = golden.load(name)
    sharded = golden_sharded(reference, comm, device=device, **{"cuda_aware": "yes", **options})
    adamw = dict(reference.meta["adamw"])
    optim = AdamW(sharded, **{**adamw, "betas": tuple(adamw["betas"])}, clip_grad_norm=reference.meta["clip_grad_norm"])
    if sharded.loss_scale is not None:
        sharded.loss_scale.value = scale
    outputs = []
    for step in range(steps):
        outputs.append(sharded.step(deal(reference.inputs[step], reference.targets[step], micro, comm.rank, comm.size)))
        optim.step(outputs[-1])
    return reference, sharded, outputs


@pytest.mark.parametrize("recompute", ["pointwise", "block"])
def test_equal_to_pytorch_by_libraries(comm, recompute):
    with lazy_cupy.installed(), lazy_nvidia.installed():
        import_module("mpshard.device.cupy_cublaslt").GELU_TYPES += ("float32",)  # so that mistakes can be told from rounding
        reference, sharded, outputs = run("gpt2", comm, "cupy", 8, 6 // comm.size, kernels="auto", recompute=recompute)
        assert "GELU and bias gradients by cuBLASLt 0" in sharded.device.about
        asked = [lazy_nvidia.calls.count(f"product with {what}") for what in ("GELU's derivative", "a bias gradient")]
    np.testing.assert_allclose([o.loss for o in outputs], reference.losses64[:8], rtol=1e-5)
    np.testing.assert_allclose([o.grad_norm for o in outputs], reference.grad_norms64[:8], rtol=1e-4)
    assert asked[0] == 1 + 2 * 2 * 8 and asked[1] > asked[0]  # layers, micro-batches, steps, and one to try it


@pytest.mark.parametrize("options", [
    {"prefetch": 0}, {"prefetch": 2, "micro": 2}, {"strategy": "grad_op", "micro": 2}, {"strategy": "optim", "micro": 2},
    {"recompute": "block"}, {"recompute": "none", "reshard_after_forward": False}, {"unit": 2}], ids=str)
def test_every_program(comm, device, monkeypatch, options, transport):
    options = dict(options)
    micro = options.pop("micro", 12) // comm.size
    monkeypatch.setattr(staged, "CHUNK", 4096)  # many chunks a unit
    reference, sharded, outputs = run("llama_tied", comm, device, 2, max(1, micro), transport=transport, **options)
    assert sharded.transport.name == (transport if comm.size > 1 else "mpi")
    np.testing.assert_allclose([o.loss for o in outputs], reference.losses64[:2], rtol=1e-5)
    np.testing.assert_allclose([o.grad_norm for o in outputs], reference.grad_norms64[:2], rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_transport_changes_no_bit(comm, device, options):
    if comm.size & (comm.size - 1):
        pytest.skip("deterministic sums want a power of two ranks")
    losses = [[o.loss for o in run("gpt2", comm, device, 3, 2, transport=transport, prefetch=prefetch, **options)[2]]
              for transport, prefetch in (("mpi", 1), ("staged", 0))]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("param", ["bf16", "fp16"])
def test_sixteen_bits(comm, device, param):
    """Weights, activations and gradients in 16 bits, sums and masters in 32."""
    reference, sharded, outputs = run("llama", comm, device, 5, 12 // comm.size, scale=64.0, transport="staged",
                                      precision=Precision(param, reduce=param))
    unit = sharded.units["layers.0"]
    assert unit.computes_in == unit.gradient_in == unit.store.local.dtype == DTYPES[param]
    assert unit.shard.dtype == unit.gradient.dtype == np.float32
    np.testing.assert_allclose([o.loss for o in outputs], reference.losses64[:5], rtol=3e-3)
    assert all(o.is_finite for o in outputs)
    np.testing.assert_allclose([o.grad_norm for o in outputs], reference.grad_norms64[:5], rtol=3e-2)
    elements = sum(unit.layout.padded_size for unit in sharded.units.values())
    if comm.size > 1:
        gathers = 2 * elements - sharded.units["embed"].layout.padded_size - sharded.units["head"].layout.padded_size
        assert outputs[-1].counters.bytes_gathered == 2 * gathers // comm.size * (comm.size - 1)
        assert outputs[-1].counters.bytes_reduced == 2 * elements // comm.size * (comm.size - 1)


def test_a_scale_that_overflows_is_halved_on_all_ranks(comm, device):
    _, sharded, outputs = run("llama", comm, device, 3, 12 // comm.size, scale=2.0**16, precision=Precision("fp16", reduce="fp16"))
    assert not any(o.is_finite for o in outputs)
    assert sharded.loss_scale.value == 2.0**14


@pytest.mark.parametrize("precision", [Precision(), Precision("bf16", reduce="bf16"), Precision("bf16")], ids=str)
def test_memory_is_what_the_plan_says(comm, device, precision):
    """To the byte, for all that lasts; staging holds what comes from all ranks for each reduce under way."""
    device.memory.reset_peak()
    _, sharded, _ = run("gpt2", comm, device, 2, 12 // comm.size, transport="staged", precision=precision)
    planned = plan(sharded.model, sharded.options, comm.size, 1, rank=comm.rank, on_host=False)
    assert planned.program == sharded.program(1)
    for kind, nbytes in planned.bytes.items():
        assert device.memory.peak(kind) == nbytes, kind
    largest, flying, most = max(unit.layout.padded_size for unit in sharded.units.values()), 0, 0
    for instruction in planned.program:
        flying += isinstance(instruction, Reduce) - isinstance(instruction, Finish)
        most = max(most, flying)
    staging = most * DTYPES[precision.reduce].itemsize * largest if comm.size > 1 else 0
    assert device.memory.peak(Kind.STAGING) <= staging


def test_the_devices_own_times_are_counted(comm, device):
    """On the stand-in a piece of work takes a millisecond, whatever the host's clock says."""
    _, _, outputs = run("gpt2", comm, device, 2, 12 // comm.size, transport="staged")
    for output in outputs:
        c = output.counters
        for milliseconds in (1000 * c.forward_s, 1000 * c.backward_s):
            assert abs(milliseconds - round(milliseconds)) < 1e-6  # a sum of differences of floats
        assert c.backward_s > 0 and c.forward_s > 0 and c.reduce_wait_s > 0  # how they compare hangs on when others' messages come
        assert 0 <= c.gather_wait_s < c.forward_s  # the wait for a copy's event, no kernel


def test_evaluation_and_logits(comm, device):
    reference, sharded, _ = run("llama", comm, device, 0)
    loss, tokens = sharded.evaluate([deal(reference.inputs[0], reference.targets[0], 12 // comm.size, comm.rank, comm.size)
                                     [i][0] for i in (0, 1)] for _ in range(1))
    np.testing.assert_allclose(loss, reference.losses64[0], rtol=1e-5)
    ids = reference.inputs[0][:3]
    np.testing.assert_allclose(sharded.logits(ids), reference.logits64, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("options", "message"), [
    ({"embedding": "rows"}, "shard.embedding=rows"), ({"transport": "shm"}, "use mpi or staged"),
    ({"progress": "thread"}, "use poll"),
    ({"precision": Precision("bf16", reduce="fp16")}, "precision.reduce"),
    ({"transport": "mpi", "cuda_aware": "no"}, "use shard.transport=staged")])
def test_refusals(comm, device, options, message):
    if "cuda_aware" in options and comm.size == 1:
        pytest.skip("one rank sends nothing")
    with pytest.raises(ConfigError, match=message):
        run("gpt2", comm, device, 0, **options)
