"""The harness itself works: the ranks form one world, and they share a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def test_ranks_form_one_world(comm):
    total = np.empty(1)
    comm.Allreduce(np.array([comm.rank + 1.0]), total)
    assert total[0] == comm.size * (comm.size + 1) / 2


def test_the_shared_folder_is_one_and_the_private_ones_are_not(comm, shared_tmp_path, tmp_path):
    (shared_tmp_path / f"{comm.rank}").touch()
    comm.barrier()
    assert len(os.listdir(shared_tmp_path)) >= comm.size
    assert len(set(comm.allgather(Path(tmp_path)))) == comm.size


def test_each_rank_computes_with_one_thread():
    from threadpoolctl import threadpool_info

    np.ones((4, 4)) @ np.ones((4, 4))
    assert [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"] == [1]
