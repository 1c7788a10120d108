"""Ranks that fail, each in its own way; `test_launch.py` runs them and checks that the harness notices."""

from __future__ import annotations

import os
import time


def test_raise(comm):
    assert comm.rank != 1, "rank 1 found something wrong"
    comm.barrier()


def test_leave(comm):
    if comm.rank == 1:
        os._exit(3)
    comm.barrier()


def test_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), 9)
    comm.barrier()


def test_stall(comm):
    def a_rank_stalls_here():
        time.sleep(1000)

    if comm.rank == 1:
        a_rank_stalls_here()
    comm.barrier()


def test_orphan(comm):
    if os.fork() == 0:
        os.closerange(0, 1024)  # or the launcher waits for the pipes the child inherited
        time.sleep(1000)
    comm.barrier()
