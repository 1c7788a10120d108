"""One training run on the stand-in for CuPy, with a mistake put in: `python -m mpi4py seeded_bugs.py NAME`, on 2 ranks.

Each is one that a GPU would forgive most of the time. Exit status 0: the losses are PyTorch's.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests import golden
from tests.device import lazy_cupy
from tests.models_small import deal, golden_sharded

DONE_ON_DEVICE = SimpleNamespace(done=True, synchronize=lambda: None)  # so does this, to the device
DONE = SimpleNamespace(done=True, synchronize=lambda: None)  # an event that claims to be done


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


def gradient_sent_before_it_is_written(m: SimpleNamespace) -> None:
    exchange = m.staged.DeviceTransport._exchange
    m.staged.DeviceTransport._exchange = lambda self, full, written, *rest: exchange(self, full, DONE, *rest)


def slot_gathered_into_while_it_is_read(m: SimpleNamespace) -> None:
    m.staged.DeviceTransport.release = nothing


def slice_sent_before_it_is_updated(m: SimpleNamespace) -> None:
    m.staged.DeviceStore.written = nothing


def copies_not_waited_for(m: SimpleNamespace) -> None:
    m.memory.CupyMemory.wait = nothing


def event_recorded_on_the_wrong_stream(m: SimpleNamespace) -> None:
    m.memory.CupyMemory.record = lambda self: self._record(self.copies)


def kernel_on_the_wrong_stream(m: SimpleNamespace) -> None:
    launch = m.memory.CupyMemory.launch

    def launched(self: Any, kernel: str, *args: Any, **kwargs: Any) -> None:
        if kernel == "gelu":
            self.copies.use()
        launch(self, kernel, *args, **kwargs)
        self.compute.use()

    m.memory.CupyMemory.launch = launched


def host_array_slipped_in(m: SimpleNamespace) -> None:
    m.memory.CupyMemory.from_host = lambda self, array, kind=None: np.asarray(array)


def pinned_memory_freed_while_it_is_copied(m: SimpleNamespace) -> None:
    class Forgetful(deque):
        def append(self, item: Any) -> None:
            pass

    m.memory.deque = Forgetful  # uploads are kept in one; so are the account's returns, which change no number


def update_of_what_is_still_on_its_way(m: SimpleNamespace) -> None:
    m.lasting._wait_for = nothing


def activation_gone_before_it_has_left(m: SimpleNamespace) -> None:
    release = m.away.Away.release

    def released(self: Any, key: Any) -> None:
        for entry in self.moved[key]:
            entry.event = DONE_ON_DEVICE
        release(self, key)

    m.away.Away.release = released
    m.memory.CupyMemory.wait = lambda self, event: None if event is DONE_ON_DEVICE else self.compute.wait_event(event)


def activation_read_before_it_is_back(m: SimpleNamespace) -> None:
    fetch = m.away.Away.fetch

    def fetched(self: Any, key: Any) -> None:
        fetch(self, key)
        for entry in self.moved[key]:
            entry.event = DONE_ON_DEVICE

    m.away.Away.fetch = fetched
    m.memory.CupyMemory.wait = lambda self, event: None if event is DONE_ON_DEVICE else self.compute.wait_event(event)


def loss_read_without_waiting(m: SimpleNamespace) -> None:
    def read(self: Any, scalars: Any) -> np.ndarray:
        host = self.pinned(8 * len(scalars)).view(np.float64)
        for place, scalar in enumerate(scalars):
            self.download(scalar, host[place:place + 1], after=[self.record()])
        return host

    m.memory.CupyMemory.read = read


BUGS: dict[str, tuple[str, Callable[[SimpleNamespace], None]]] = {  # name: transport, what to do
    "none-mpi": ("mpi", nothing), "none-staged": ("staged", nothing),
    **{f"{bug.__name__}-{transport}": (transport, bug) for transport, bug in (
        ("mpi", gradient_sent_before_it_is_written), ("mpi", slot_gathered_into_while_it_is_read),
        ("staged", slot_gathered_into_while_it_is_read), ("mpi", slice_sent_before_it_is_updated),
        ("staged", slice_sent_before_it_is_updated), ("staged", copies_not_waited_for),
        ("staged", event_recorded_on_the_wrong_stream), ("staged", kernel_on_the_wrong_stream),
        ("mpi", host_array_slipped_in), ("mpi", pinned_memory_freed_while_it_is_copied), ("mpi", loss_read_without_waiting),
        ("mpi", update_of_what_is_still_on_its_way), ("mpi", activation_gone_before_it_has_left),
        ("mpi", activation_read_before_it_is_back))}}


def main(name: str, steps: int = 2) -> None:
    transport, plant = BUGS[name]
    with lazy_cupy.installed():
        from mpi4py import MPI

        import mpshard.device.cupy_memory as memory
        from mpshard.comm import staged
        from mpshard.device import lasting, open_device
        from mpshard.optim import AdamW
        from mpshard.shard import away

        staged.CHUNK, away.SMALLEST = 4096, 1
        plant(SimpleNamespace(staged=staged, memory=memory, lasting=lasting, away=away))
        comm, reference = MPI.COMM_WORLD, golden.load("gpt2")
        # A master that goes to the host leaves by the stream that also sends the slice, which orders the two by itself.
        offload = "none" if plant is slice_sent_before_it_is_updated else "all"
        sharded = golden_sharded(reference, comm, device=open_device("cupy", poison=True), transport=transport, cuda_aware="yes",
                                 offload=offload)
        adamw = dict(reference.meta["adamw"])
        optim = AdamW(sharded, **{**adamw, "betas": tuple(adamw["betas"])}, clip_grad_norm=reference.meta["clip_grad_norm"])
        for step in range(steps):
            micro = 12 // comm.size
            output = sharded.step(deal(reference.inputs[step], reference.targets[step], micro, comm.rank, comm.size))
            np.testing.assert_allclose(output.loss, reference.losses64[step], rtol=1e-5)
            np.testing.assert_allclose(output.grad_norm, reference.grad_norms64[step], rtol=1e-4)
            optim.step(output)


if __name__ == "__main__":
    main(sys.argv[1])
