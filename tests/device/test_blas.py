"""Threads of the BLAS, cores of the process."""

from __future__ import annotations

import os

import pytest

from mpshard.device import blas


def test_set_blas_threads():
    before = blas.blas_info().threads
    try:
        assert blas.set_blas_threads(1) == 1
        assert blas.blas_info().threads == 1
    finally:
        blas.set_blas_threads(before)
    with pytest.raises(ValueError, match="not 0"):
        blas.set_blas_threads(0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_available_cores_follow_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert blas.available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= blas.available_cores() <= len(before)


def test_cgroup_quota(tmp_path):
    assert blas._cgroup_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert blas._cgroup_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("350000\n")
    assert blas._cgroup_quota(tmp_path) == 3.5
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert blas._cgroup_quota(tmp_path) == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert blas._cgroup_quota(tmp_path) is None
