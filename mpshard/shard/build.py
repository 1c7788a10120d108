"""`shard`: from a model's shapes and some ranks to a model that can be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from mpshard import comm as communication
from mpshard.comm import collectives, shared
from mpshard.comm.agree import agree
from mpshard.comm.collectives import Progress, progress_for
from mpshard.comm.mesh import Mesh
from mpshard.comm.staged import DeviceReplicas, device_transport
from mpshard.comm.transport import MessageTransport, ReplicaTransport, Transport
from mpshard.config import ConfigError
from mpshard.device import c_library, compiled, cpu_kernels, gpu_libraries, mkl, open_device
from mpshard.device.base import Accelerator, Device
from mpshard.device.blas import cpu_flags
from mpshard.device.numpy_device import NumpyDevice
from mpshard.nn.module import Model
from mpshard.shard.options import Options, refuse
from mpshard.shard.precision import DTYPES, Precision
from mpshard.shard.sharded import Sharded

if TYPE_CHECKING:
    from mpi4py import MPI


def shard(model: Model, comm: MPI.Comm | None = None, *, strategy: str = "full", prefetch: int = 1,
          reshard_after_forward: bool | int = True, unit: str | int | Sequence[str] = "block", accumulate: str = "auto",
          deterministic: bool = False, dp_shard: int = 0, dp_replicate: int = 0, reduce: str = "mpi",
          embedding: str = "auto", transport: str = "auto", progress: str = "auto",
          recompute: str | int = "pointwise", offload: str = "none", precision: Precision | None = None,
          device: Device | str = "numpy", seed: int = 0, ignore_index: int = -100, ranks_on_node: int = 0,
          cuda_aware: str = "auto", kernels: str = "auto") -> Sharded:
    """Cut a model into units over the ranks of `comm` and give each rank its slice, filled with initial values.

    Parameters
    ----------
    model: shapes only, from `mpshard.models`.
    comm: default COMM_WORLD. Collective over it.
    strategy: what is sharded. "full": weights, gradients and moments (ZeRO-3). "grad_op": weights stay full through the step
        (ZeRO-2). "optim": gradients too, and are reduced once a step (ZeRO-1). "none": nothing; gradients are summed
        everywhere. "hybrid": as full inside groups of dp_shard ranks, replicated over dp_replicate groups; each replica
        owns, sums and updates a part of the group's slice. Rajbhandari et al. 2019 (arXiv:1910.02054).
    prefetch: how many stages ahead of the compute a gather is started, in both directions.
    reshard_after_forward: False keeps units full from forward to backward; a number k keeps them among k neighbouring ranks,
        1/k on each, so that the gather before backward goes no further than these (the ranks of a node, say).
    unit: what is gathered at once: "block", a number of blocks, a size ("64MB"), or a list of name patterns.
    accumulate: add up micro-batches "sharded" (each is reduced), "unsharded" (in full buffers, reduced once), or "auto".
    deterministic: sums in one fixed tree, so that 1, 2, 4, 8 ranks, any prefetch, unit size, transport and strategy but
        hybrid give the same bits. Asks for a power of two ranks, the same machine and number of BLAS threads; costs
        log2(micro-batches) more gradient slices, an ordered reduce of every micro-batch, and an exact norm.
    dp_shard, dp_replicate: sizes for hybrid; 0: the ranks of a node, and as many groups as there are.
    reduce: of messages: "mpi", MPI's reduce-scatter; "alltoall", an all-to-all and a local sum in a fixed order. A
        GPU always does the second.
    embedding: what travels of a table of embeddings that only lookups read: "whole", all of it; "rows", those that the
        micro-batches' tokens name, and their gradients; "auto", rows where units travel as messages and some go to other nodes:
        that is, with "auto" for the transport, where every rank has a node of its own.
    transport: "mpi", plain messages; "shm", memory that the ranks of a node share; "auto", shm where it can be had. On a
        GPU: "mpi", messages from and to its memory; "staged", through pinned memory of the host; "auto", mpi if it can.
    progress: "poll" between kernels; "timer": also every 2 ms during them; "thread": one that runs the communication, for ranks
        with a core to spare; "auto": the thread for these, else the timer where messages go to other nodes.
    recompute: what backward makes again instead of keeping it: "none"; "pointwise": the results of norms and activation
        functions, a third of what a block keeps for about 1 % of the time; "block": whole blocks, of which only the input
        is kept; k: every k-th block.
    offload: what waits in the host's memory for its next use on a GPU: "none"; "optimizer": moments, the average and, where
        weights travel in a shorter format than theirs, the masters, unit by unit on the GPU for their update;
        "activations": what forward keeps for backward, but of the last two stages; "all". Changes no bit; on a CPU,
        whose memory is the host's, nothing.
    precision: formats of gathered weights, travelling gradients, masters, and of products; default fp32 throughout.
    device: "numpy", "cupy", "auto" (cupy where there is a GPU), or a Device.
    seed: with parameter names, decides initial values and dropout masks.
    ignore_index: the target that means "nothing to learn here".
    ranks_on_node: 0, what MPI says; a divisor of it cuts a node into several, for tests.
    cuda_aware: whether MPI takes GPU memory: "yes", "no", or "auto", which tries.
    kernels: of a CPU: "numpy"; "compiled", the best that all ranks have; "auto", compiled where there are any. Of a GPU:
        "cuda", the project's own; "auto", also cuDNN's attention and cuBLASLt's products with a bias, its gradient or a GELU and
        of 8 bits, where they are installed and right on all ranks. Last bits differ.

    Raises
    ------
    ConfigError, on every rank, for a choice that is not known, cannot be combined or cannot be had here.
    """
    options = Options(strategy, prefetch, reshard_after_forward, unit, accumulate, deterministic, dp_shard, dp_replicate,
                      reduce, embedding, transport, progress, recompute, offload, precision or Precision())
    comm = communication.world if comm is None else comm
    mesh = Mesh(comm, _group_size(options, comm, ranks_on_node))
    if deterministic and mesh.world & (mesh.world - 1):
        raise ConfigError(f"shard.deterministic=true needs a power of two ranks, not {mesh.world}")
    opened = agree(mesh.comm, lambda: open_device(
        device, False, mesh.node_rank, mesh.ranks_on_node, options.precision.tf32,
        _kernels(kernels, comm))) if isinstance(device, str) else device
    refuse(options, model, opened.on_host)
    if opened.on_host:
        if isinstance(device, str) and kernels == "cuda":
            raise ConfigError("run.kernels=cuda is of a GPU; with run.device=numpy use auto, numpy or compiled")
        if isinstance(device, str) and options.precision.param == "bf16":
            _multiply_bf16(cast(NumpyDevice, opened), mesh)
        mover = progress_for(progress, mesh.cores, mesh.world, ranks_on_node or mesh.ranks_on_node)
        carrier = _transport(options, model, mesh, ranks_on_node or mesh.ranks_on_node, opened, mover)
    else:
        if isinstance(device, str):
            _libraries(opened, kernels, comm, options.precision.products == "fp8")
        mover = progress_for("poll", mesh.cores, mesh.world, mesh.ranks_on_node)  # the host is free while kernels run
        # It takes only the stores and slots that it makes.
        messages = device_transport(mesh.comm, cast(Accelerator, opened), mover, transport, cuda_aware, mesh.group)
        carrier = cast(Transport, DeviceReplicas(messages) if options.replicated else messages)
    if isinstance(device, str) and options.precision.products == "fp8":
        opened.about += f", fp8 products {opened.fp8_products}"
    # Counts of a message are 32 bits.
    plain = isinstance(carrier, MessageTransport) and mesh.group.size > 1 and model.size < collectives.COUNT_LIMIT
    by_rows = options.sends_rows(plain, (ranks_on_node or mesh.ranks_on_node) < mesh.group.size)
    return Sharded(model, mesh, opened, carrier, mover, options, seed=seed, ignore_index=ignore_index, by_rows=by_rows)


def _kernels(choice: str, comm: MPI.Comm) -> str:
    """Whose kernels all ranks take on a CPU: if they differed, so would what replicas compute."""
    if choice not in ("auto", "numpy", "compiled", "cuda"):
        raise ConfigError(f'run.kernels="{choice}" is not known; use auto, numpy, compiled, cuda')
    known = ("numpy", *c_library.ORDER)
    common = -int(collectives.all_max(comm, np.array([-known.index(cpu_kernels()[-1])], np.int64))[0])
    if choice == "compiled" and not common:
        reason = c_library.load()
        raise ConfigError("run.kernels=compiled cannot be had"
                          + (f": {reason}" if isinstance(reason, str) else ": some ranks have none; use auto"))
    return "numpy" if choice == "numpy" else known[common]


def _libraries(device: Device, choice: str, comm: MPI.Comm, fp8: bool) -> None:
    """Let a GPU use NVIDIA's libraries where all ranks can: if only some did, results would depend on who computes them."""
    if choice in ("numpy", "compiled"):
        raise ConfigError(f"run.kernels={choice} is of a CPU; with run.device=cupy use auto or cuda")
    if choice == "auto":
        gpu_libraries(device, lambda here: [not missing for missing in collectives.all_max(
            comm, np.array([not each for each in here], np.int64))], fp8)


def _multiply_bf16(device: NumpyDevice, mesh: Mesh) -> None:
    """Let products be bfloat16 where all ranks do them faster so: if only some did, results would depend on who computes them.

    Our own are for one core, and know nothing of AMX.
    """
    ours = isinstance(device, compiled.CompiledDevice) and mesh.cores == 1 and c_library.multiplies_bf16()
    product = "not asked" if ours and "amx_bf16" not in cpu_flags() else mkl.find()
    without_ours, without_mkl = collectives.all_max(mesh.comm, np.array([not ours, isinstance(product, str)], np.int64))
    if not without_mkl:
        device.bf16_product = cast("Callable[..., None]", product)
        device.about += ", bfloat16 products by MKL"
    elif not without_ours:
        cast(compiled.CompiledDevice, device).products = "bf16"
        device.about += ", bfloat16 products"


def _group_size(options: Options, comm: MPI.Comm, ranks_on_node: int) -> int:
    """Ranks among which a unit is gathered; 0: all."""
    if options.strategy != "hybrid":
        return 0
    size, groups = options.dp_shard, options.dp_replicate
    if not size:
        size = comm.size // groups if groups else ranks_on_node or communication.ranks_on_node(comm)
    groups = groups or max(1, comm.size // size)
    if size * groups != comm.size:
        raise ConfigError(f"mesh.dp_shard x mesh.dp_replicate = {size} x {groups} is not the number of ranks, {comm.size}; use divisors "
                          "of it that multiply out, or 0 for one of them")
    return size


def _transport(options: Options, model: Model, mesh: Mesh, node: int, device: Device, progress: Progress) -> Transport:
    ordered = options.reduce == "alltoall" or options.deterministic
    if options.replicated:
        return ReplicaTransport(mesh.comm, device, progress, ordered)
    apart = options.transport == "auto" and node == 1 and mesh.group.size > 1
    if not options.wants_messages and not apart:
        # Of shared memory a node needs the whole model once, and each rank's gradient buffers, of which the largest
        # unit counts; twice the model is more than that unless one unit is nearly all of it.
        problem = shared.fits(mesh.group, min(node, mesh.group.size), 2 * model.size * DTYPES[options.precision.master].itemsize)
        if problem is None:
            return shared.SharedTransport(mesh.group, min(node, mesh.group.size), device, progress)
        if options.transport == "shm":
            raise ConfigError(f"shard.transport=shm cannot be used: {problem}; use shard.transport=mpi")
    return MessageTransport(mesh.group, device, progress, ordered)
