"""Tracing a run: the engine's observer, the ranks' clocks and one file, put together."""

from __future__ import annotations

import socket
from pathlib import Path

from mpshard.comm.agree import agree
from mpshard.comm.clock import clock_offset
from mpshard.device.base import Kind
from mpshard.observe.trace import RankTrace, Recorder, write_trace
from mpshard.shard import Sharded


class Tracing:
    """Traces the first `steps` steps of a run, writes `path` and gets out of the way. Collective throughout."""

    def __init__(self, sharded: Sharded, path: Path, steps: int) -> None:
        self.sharded, self.path, self.left = sharded, path, steps
        mesh, memory = sharded.mesh, sharded.device.memory
        offset, _ = clock_offset(mesh.comm)
        self.recorder = Recorder(RankTrace(mesh.rank, socket.gethostname(), offset),
                                 memory=lambda: {kind.value: memory.current(kind) for kind in Kind},
                                 step=lambda: sharded.steps + 1)
        sharded.engine.watch(self.recorder)

    def done(self, step: int, start: float, updating: float, end: float) -> None:
        """Step `step` took from `start` to `end`, its update began at `updating`, seconds of time.perf_counter."""
        if self.left == 0:
            return
        self.recorder.step_done(step, start, updating, end)
        self.left -= 1
        if self.left == 0:
            self._finish()

    def close(self) -> None:
        """Write what there is, if the run ended before `steps` steps."""
        if self.left:
            self.left = 0
            self._finish()

    def _finish(self) -> None:
        self.sharded.engine.watch(None)
        comm = self.sharded.mesh.comm
        ranks = comm.gather(self.recorder.trace)
        agree(comm, lambda: write_trace(self.path, ranks) if ranks is not None else None)
        self.recorder.trace = RankTrace(comm.rank, "", 0.0)
