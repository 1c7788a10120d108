"""The BLAS that NumPy found: which one it is, and how many threads it may use."""

from __future__ import annotations

import ctypes
import itertools
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy  # noqa: F401  (loads the BLAS that threadpoolctl looks for)
import threadpoolctl


@dataclass(frozen=True)
class BlasInfo:
    """One loaded BLAS library. `architecture` is the kernel set it chose for this CPU, where it says."""

    name: str
    version: str
    architecture: str
    threads: int


def blas_info() -> BlasInfo:
    """The BLAS behind numpy.matmul; of several loaded ones the first. `name` is "unknown" where none is recognised."""
    for library in threadpoolctl.threadpool_info():
        if library["user_api"] == "blas":
            architecture = library.get("architecture", "?")
            return BlasInfo(library["internal_api"], library["version"] or "?", architecture, library["num_threads"])
    return BlasInfo("unknown", "?", "?", 1)


def set_blas_threads(n: int) -> int:
    """Let every loaded BLAS use `n` threads; returns how many NumPy's uses now.

    Raises ValueError for n < 1. A BLAS that threadpoolctl does not know keeps its number (then 1 is returned).
    """
    if n < 1:
        raise ValueError(f"BLAS threads must be at least 1, not {n}")
    threadpoolctl.threadpool_limits(limits=n, user_api="blas")
    threads.cache_clear()
    return threads()


@cache
def threads() -> int:
    """How many threads NumPy's BLAS uses, as `set_blas_threads` left it."""
    return blas_info().threads


@cache
def sgemm() -> tuple[int, bool] | None:
    """Where the cblas_sgemm of NumPy's BLAS is, for C, and whether its integers have 64 bits; None where it is not found."""
    for library in threadpoolctl.threadpool_info():
        if library["user_api"] == "blas":
            loaded = ctypes.CDLL(library["filepath"])
            for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "")):
                found = getattr(loaded, f"{prefix}cblas_sgemm{suffix}", None)
                if found is not None:
                    return ctypes.cast(found, ctypes.c_void_p).value or 0, bool(suffix)
    return None


def cpu_flags() -> frozenset[str]:
    """What Linux says this processor can: "avx2", "avx512_bf16", ...; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    line = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def available_cores() -> int:
    """Cores this process may run on: its affinity, and no more than a container's quota of CPU time, rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs' worth of time the control group allows (version 2, then 1), None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    return None if quota in ("max", "-1") else float(quota) / float(period)
