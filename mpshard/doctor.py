"""`mpshard doctor`: what this machine and this launch are, what is slow or wrong about them, and the remedy.

Facts are gathered on all ranks, judged on each alike. A judge is a pure function from facts to a `Check`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from mpshard import __version__, launcher
from mpshard.bench.gemm import orientations
from mpshard.bench.work import Product
from mpshard.comm import cuda_probe, facts, shared
from mpshard.comm.collectives import best_progress
from mpshard.comm.facts import MpiFacts, RankFacts
from mpshard.comm.mesh import Mesh
from mpshard.device import c_library, cpu_kernels, gpu_libraries, mkl, open_device, why_no_cupy
from mpshard.device.blas import BlasInfo, blas_info, cpu_flags, set_blas_threads

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL_SHM = 1 << 30  # bytes: what containers give /dev/shm by default (64 MiB) is far below
AVX2_ONLY = ("Haswell", "Zen", "Excavator", "Prescott", "Core2", "Nehalem", "Sandybridge", "Barcelona", "Bulldozer", "Piledriver")
THROTTLES = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "MKL_ENABLE_INSTRUCTIONS")


class Verdict(StrEnum):
    OK = "ok"
    SLOW = "slow"
    WRONG = "wrong"


@dataclass(frozen=True)
class Check:
    """One finding. remedy: what to do about it; empty where nothing is needed."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine(comm: MPI.Comm, environ: Mapping[str, str]) -> dict[str, Any]:
    """All checks of this launch: {"checks": [...], "nodes": [...], "verdict": the worst}. Collective, equal on all ranks."""
    mesh, mpi = Mesh(comm), facts.mpi_facts()
    ranks = facts.rank_facts(comm, {name: _version(name) for name in ("mpshard", "mpi4py", "numpy")})
    threads = set_blas_threads(mesh.cores)
    problem, no_gpu = shared.fits(mesh.comm, mesh.ranks_on_node, 0), why_no_cupy()
    checks = [
        judge_world(comm.size, comm.allgather(launcher.wrong_world(comm.size))),
        judge_mpi(mpi, ranks),
        judge_versions(ranks),
        judge_cores(ranks),
        judge_blas(blas_info(), mesh.cores, threads, environ, cpu_flags()),
        judge_kernels(comm.allgather(cpu_kernels()[-1]), c_library.load()),
        judge_bf16(c_library.multiplies_bf16() and mesh.cores == 1, mkl.find()),
        judge_transport(comm.size, problem),
        judge_shm(ranks),
        judge_progress(mesh.cores, comm.size, mesh.ranks_on_node, mpi.threads),
        judge_huge_pages(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        judge_gpu(no_gpu),
        *([] if no_gpu else [judge_cuda_aware(cuda_probe.probe() if comm.rank == 0 else None),
                             judge_libraries(gpu_libraries(open_device("cupy"), list) if comm.rank == 0 else [])]),
        *judge_rates(comm.allgather(_matrix_rate()), ranks),
        *judge_links(ranks)]
    order = list(Verdict)
    checks = comm.bcast(checks)
    return {"verdict": max((c.verdict for c in checks), key=order.index).value, "checks": [asdict(c) for c in checks],
            "nodes": nodes(ranks)}


# -- judges ----------------------------------------------------------------------------------
def judge_world(size: int, problems: Sequence[str | None]) -> Check:
    """problems: what `launcher.wrong_world` says on each rank."""
    ranks = f"{size} rank{'s' * (size > 1)}"
    problem = next((text for text in problems if text is not None), None)
    if problem is not None:
        found, _, remedy = problem.partition(": the launcher")
        return Check("world", Verdict.WRONG, found, f"the launcher{remedy}")
    return Check("world", Verdict.OK, f"{ranks}, as launched", "" if size > 1 else "for more: mpirun -n N mpshard ...")


def judge_mpi(mpi: MpiFacts, ranks: Sequence[RankFacts]) -> Check:
    libraries = sorted({rank.library for rank in ranks})
    found = f"{mpi.library}, MPI {mpi.standard}, thread level {mpi.threads}"
    if len(libraries) > 1:
        return Check("MPI", Verdict.WRONG, f"ranks run different libraries: {', '.join(libraries)}", "install one MPI on all nodes")
    if mpi.threads != "multiple":
        return Check("MPI", Verdict.SLOW, found, "a communication thread needs MPI_THREAD_MULTIPLE: use an MPI built with it "
                                                 "(or do not lower mpi4py.rc.thread_level)")
    return Check("MPI", Verdict.OK, found)


def judge_versions(ranks: Sequence[RankFacts]) -> Check:
    differ = {name: sorted({rank.versions[name] for rank in ranks}) for name in ranks[0].versions}
    uneven = [f"{name} {' and '.join(values)}" for name, values in differ.items() if len(values) > 1]
    if uneven:
        return Check("versions", Verdict.WRONG, f"ranks differ: {'; '.join(uneven)}", "use one environment on all nodes")
    return Check("versions", Verdict.OK, ", ".join(f"{name} {values[0]}" for name, values in differ.items()))


def judge_cores(ranks: Sequence[RankFacts]) -> Check:
    """Does every rank have a core, and does none lie idle because of binding?"""
    for node in {rank.node for rank in ranks}:
        here = [rank for rank in ranks if rank.node == node]
        union = {core for rank in here for core in rank.affinity}
        if union and len(union) < len(here):
            host, count = here[0].host, len(here)
            if all(rank.affinity == here[0].affinity for rank in here) and len(union) == 1 and (os.cpu_count() or 1) > 1:
                return Check("cores", Verdict.SLOW, f"{count} ranks on {host} are all bound to core {union.pop()}",
                             "let the launcher bind them apart or not at all: mpirun --bind-to core (or none), srun --cpu-bind=cores")
            return Check("cores", Verdict.SLOW, f"{count} ranks on {host} share {len(union)} cores", "start no more ranks than cores")
    cores = sorted({rank.cores for rank in ranks})
    found = f"{cores[0]}{f' to {cores[-1]}' if len(cores) > 1 else ''} a rank"
    if len(cores) > 1:
        return Check("cores", Verdict.SLOW, found, "all wait for the rank with the fewest: give every rank as many")
    return Check("cores", Verdict.OK, found)


def judge_blas(blas: BlasInfo, cores: int, threads: int, environ: Mapping[str, str], cpu_flags: frozenset[str]) -> Check:
    """Does the matrix product use the rank's cores and the CPU's widest instructions?

    threads: that it agreed to use after being asked for `cores`.
    """
    found = f"{blas.name} {blas.version}, kernels for {blas.architecture}, {threads} of {cores} thread{'s' * (cores > 1)}"
    for name in THROTTLES:
        if environ.get(name):
            return Check("BLAS", Verdict.SLOW, f"{found}; {name}={environ[name]}", f"unset {name}: the library knows this CPU")
    if "avx512f" in cpu_flags and blas.name == "openblas" and blas.architecture in AVX2_ONLY:
        return Check("BLAS", Verdict.SLOW, f"{found}, though the CPU has AVX-512", "upgrade numpy: its OpenBLAS is older than this CPU")
    if threads < cores:
        return Check("BLAS", Verdict.SLOW, found, "unset OMP_NUM_THREADS and OPENBLAS_NUM_THREADS" if blas.name != "unknown" else
                     "threadpoolctl does not know this BLAS: set its thread variable to the cores of a rank yourself")
    if blas.name == "unknown":
        return Check("BLAS", Verdict.SLOW, "none that threadpoolctl recognises", "install numpy's wheel, which brings OpenBLAS")
    return Check("BLAS", Verdict.OK, found)


def judge_kernels(chosen: Sequence[str], found: object) -> Check:
    """Whose kernels a CPU runs. chosen: of each rank. found: of `mpshard.device.c_library.load`."""
    common = min(chosen, key=("numpy", *c_library.ORDER).index)
    if common == "numpy":
        reason = found if isinstance(found, str) else "some ranks have no compiled ones"
        return Check("kernels", Verdict.SLOW, f"NumPy's: {reason}", "install mpshard where there is a C compiler")
    slower = f"; some ranks could do more than {common}" if len(set(chosen)) > 1 else ""
    return Check("kernels", Verdict.OK, f"compiled, for {common}{slower}")


def judge_bf16(ours: bool, found: object) -> Check:
    """What precision.param=bf16 computes with on the CPU. ours: there are compiled products, and a core a rank, for which they
    are made. found: of `mpshard.device.mkl.find`."""
    if ours:
        return Check("bfloat16", Verdict.OK, "compiled products")
    if not isinstance(found, str):
        return Check("bfloat16", Verdict.OK, "products by MKL")
    return Check("bfloat16", Verdict.OK, f"products in float32: {found}")


def judge_transport(world: int, problem: str | None) -> Check:
    """What shard.transport=auto would take."""
    if world == 1:
        return Check("transport", Verdict.OK, "one rank: nothing travels")
    if problem is None:
        return Check("transport", Verdict.OK, "auto = shm: the ranks of a node share memory")
    return Check("transport", Verdict.OK if "no two" in problem else Verdict.SLOW, f"auto = mpi: {problem}",
                 "" if "no two" in problem else "shared memory is faster inside a node")


def judge_shm(ranks: Sequence[RankFacts]) -> Check:
    least = min(ranks, key=lambda rank: rank.shm[1] if rank.shm else 0)
    if least.shm is None:
        return Check("shared memory", Verdict.SLOW, f"no /dev/shm on {least.host}", "mount a tmpfs there")
    size, free = least.shm
    found = f"/dev/shm {_gib(free)} free of {_gib(size)} on {least.host}"
    if free < SMALL_SHM:
        return Check("shared memory", Verdict.SLOW, found, "a node holds 4 bytes a parameter there, and each rank's gradient buffers: "
                     "docker run --shm-size=8g, mount -o remount,size=8g /dev/shm, or remove what killed jobs left (ls /dev/shm)")
    return Check("shared memory", Verdict.OK, found)


def judge_progress(cores: int, world: int, node: int, threads: str) -> Check:
    """What shard.progress=auto would take. node: ranks on this one."""
    chosen = best_progress(cores, world, node, threads == "multiple")
    why = {"thread": f"a rank has {cores} cores, one communication thread fits in",
           "timer": "a rank has one core, which the compute keeps busy, and others are on other nodes",
           "poll": "one rank: nothing to progress" if world == 1 else f"thread level {threads}" if threads != "multiple" else
                   "a rank has one core, which the compute keeps busy: between kernels"}
    remedy = f"an MPI with MPI_THREAD_MULTIPLE would drive messages during kernels, not only between them (this one: {threads})"
    slow = chosen == "poll" and node < world
    return Check("progress", Verdict.SLOW if slow else Verdict.OK, f"auto = {chosen}: {why[chosen]}", remedy if slow else "")


def judge_huge_pages(setting: str | None) -> Check:
    """setting: of transparent_hugepage/enabled, for instance "always [madvise] never"."""
    if setting is None:
        return Check("huge pages", Verdict.OK, "this kernel has no transparent huge pages")
    chosen = setting[setting.find("[") + 1:setting.find("]")]
    if chosen == "never":
        return Check("huge pages", Verdict.SLOW, "transparent huge pages: never",
                     "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)")
    return Check("huge pages", Verdict.OK, f"transparent huge pages: {chosen}")


def judge_gpu(problem: str | None) -> Check:
    if problem is None:
        return Check("GPU", Verdict.OK, "CuPy finds one; run.device=cupy uses it")
    return Check("GPU", Verdict.OK, f"none used: {problem}")


def judge_cuda_aware(found: cuda_probe.Verdict | None) -> Check:
    """found: on the first rank, whose checks count."""
    if found is None or found.aware:
        return Check("CUDA-aware MPI", Verdict.OK, f"{found.why if found else '?'}: shard.transport=auto is mpi on GPUs")
    return Check("CUDA-aware MPI", Verdict.SLOW, f"{found.why}: shard.transport=auto is staged on GPUs",
                 "an MPI built with CUDA saves the copies through the host")


def judge_libraries(missing: Sequence[str]) -> Check:
    """missing: why a GPU cannot use some of NVIDIA's libraries, on the first rank, whose checks count."""
    if not missing:
        return Check("GPU libraries", Verdict.OK, "cuDNN's attention, cuBLASLt's products with a bias or a GELU and of 8 bits")
    return Check("GPU libraries", Verdict.OK, f"the project's own kernels do without: {'; '.join(missing)}")


def judge_rates(rates: Sequence[float], ranks: Sequence[RankFacts]) -> list[Check]:
    """rates: GFLOP/s of a matrix product on every rank at once."""
    slowest = min(range(len(rates)), key=rates.__getitem__)
    middle = sorted(rates)[len(rates) // 2]
    found = f"{middle:,.0f} GFLOP/s a rank in fp32"
    if rates[slowest] < 0.75 * middle:
        return [Check("matrix rate", Verdict.SLOW, f"{found}; rank {slowest} on {ranks[slowest].host} only {rates[slowest]:,.0f}",
                      "all wait for the slowest: see what else runs there, or leave that node out")]
    return [Check("matrix rate", Verdict.OK, found)]


def judge_links(ranks: Sequence[RankFacts]) -> list[Check]:
    """Between nodes; nothing to say of one node."""
    links = [rank for rank in ranks if rank.link]
    if not links:
        return []
    slowest = min(links, key=lambda rank: rank.link)
    middle = sorted(rank.link for rank in links)[len(links) // 2]
    found = f"{middle / 1e6:,.0f} MB/s from node to node, both ways at once"
    if slowest.link < 0.5 * middle:
        return [Check("network", Verdict.SLOW, f"{found}; {slowest.host} only {slowest.link / 1e6:,.0f}", "look at that node's link")]
    return [Check("network", Verdict.OK, found)]


# -- showing ---------------------------------------------------------------------------------
def nodes(ranks: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Ranks by node: host, ranks, their cores and binding, shared memory, link to the next node."""
    found = []
    for node in sorted({rank.node for rank in ranks}):
        here = [rank for rank in ranks if rank.node == node]
        found.append({"host": here[0].host, "ranks": [rank.rank for rank in here], "cores_per_rank": [rank.cores for rank in here],
                      "binding": [list(rank.affinity) for rank in here], "shm_free_bytes": here[0].shm[1] if here[0].shm else 0,
                      "link_bytes_per_s": max(rank.link for rank in here)})
    return found


def screen(found: dict[str, Any]) -> Group:
    """What `examine` returns, as tables."""
    colours = {"ok": "green", "slow": "yellow", "wrong": "red"}
    checks = Table(title=f"mpshard {__version__} doctor: {found['verdict']}")
    remedies = any(check["remedy"] for check in found["checks"])
    for name in ("", "verdict", "found", *["remedy"] * remedies):
        checks.add_column(name)
    for check in found["checks"]:
        colour = colours[check["verdict"]]
        checks.add_row(check["name"], f"[{colour}]{check['verdict']}[/]", escape(check["found"]), *[escape(check["remedy"])] * remedies)
    table = Table("host", "ranks", "cores each", "bound to", "shared memory free", "from the next node", title="nodes")
    for node in found["nodes"]:
        bound = [_spans(cores) for cores in node["binding"]]
        link = f"{node['link_bytes_per_s'] / 1e6:,.0f} MB/s" if node["link_bytes_per_s"] else "-"
        table.add_row(node["host"], _spans(node["ranks"]), " ".join(map(str, dict.fromkeys(node["cores_per_rank"]))),
                      bound[0] if len(set(bound)) == 1 else " | ".join(bound), _gib(node["shm_free_bytes"]), link)
    return Group(checks, table)


def _spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in spans) or "-"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f} GiB"


# -- facts of this rank ----------------------------------------------------------------------
def _matrix_rate() -> float:
    """GFLOP/s of one product, the best of a few."""
    product, best = Product(1024, 512, 1024), float("inf")
    action = orientations(open_device("numpy"), product, "float32")["forward"]
    for _ in range(5):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return product.flops / best / 1e9


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str:
    try:
        return __version__ if package == "mpshard" else version(package)
    except PackageNotFoundError:
        return "not installed"
