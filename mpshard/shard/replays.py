"""Passes through small blocks as one call each: see `mpshard.device.replay`, which writes them down and makes them again.

A pass is what forward and backward of one module do on a micro-batch of one shape. The first is done as ever, so that whatever
is made once (tables, scratch memory) is there; the second is recorded; and then, before the recording is trusted, made once more
from memory full of NaN, with the gradients put back to what they were: only if every bit of the result, of what forward keeps and
of the gradients is the same will the next ones be made from it. So a replay changes no bit, and what cannot be replayed
(NumPy's own work, dropout, whose numbers are new each time) goes on as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mpshard.autograd.tensor import Parameter, Tape, Tensor
from mpshard.device.base import Array, Device
from mpshard.nn.module import MicroBatch, Module
from mpshard.shard.schedule import Stage

if TYPE_CHECKING:
    from mpshard.device.replay import Recorder, Recording
    from mpshard.shard.unit import Unit

SMALL = 512 << 10  # bytes of a block's input: beyond, kernels take so long that Python between them does not matter

Y = 1  # number of the output among what every pass is given: see `Replays._places`


@dataclass
class Pass:
    """Forward and backward that have been recorded.

    places: of a micro-batch the arrays that both are given. gradients: the buffers that backward adds to. scratch: so many bytes.
    dx: whether backward leaves the input's gradient in the output's ("dy"), in an array of its own ("new"), or makes none ("").
    """

    device: Device
    places: Callable[[Tensor, Tensor | None, MicroBatch], list[Array | None]]
    gradients: Callable[[], list[Array]]
    scratch: Callable[[int], Array]
    forwards: Recording
    backwards: Recording
    shape: tuple[int, ...]
    dtype: Any
    dx: str
    learning: Sequence[Parameter]

    def forward(self, tape: Tape, x: Tensor, batch: MicroBatch) -> Tensor:
        y = Tensor(self.device.empty(self.shape, self.dtype))
        kept = _bytes(self.device, self.forwards.kept_bytes)
        self.forwards.run(kept, self.scratch(self.forwards.scratch_bytes), self.places(x, y, batch))
        tape.entries.append((self.backward, y, (x, y, batch, kept)))
        tape.after_op()
        return y

    def backward(self, tape: Tape, dy: Array, x: Tensor, y: Tensor, batch: MicroBatch, kept: Array) -> None:
        started = {parameter.grad_started for parameter in self.learning}
        if len(started) > 1:
            raise RuntimeError("some of a block's gradients have been started and others have not")
        new = self.device.empty(x.data.shape, x.data.dtype) if self.dx == "new" else None
        self.backwards.run(kept, self.scratch(self.backwards.scratch_bytes), [*self.places(x, y, batch), dy, new, *self.gradients()],
                           True in started)
        for parameter in self.learning:
            parameter.grad_started = True
        x.grad = dy if self.dx == "dy" else new


class Replays:
    """Decides, for each pass, whether it is done as ever, recorded, or replayed.

    Attributes
    ----------
    passes: {(module, shape of the input, ...): a pass, or why there is none}. replayed: passes made from a recording so far.
    """

    def __init__(self, device: Device, units: Mapping[str, Unit], stages: Mapping[str, Stage]) -> None:
        self.device, self.units, self.stages = device, units, stages
        self.passes: dict[tuple[Any, ...], Pass | str] = {}
        self.under_way: dict[Tape, tuple[tuple[Any, ...], Recorder, Module, Tensor, MicroBatch]] = {}
        self.on, self.whole, self.replayed = True, True, 0
        self.scratch: Array | None = None

    def begin(self, whole: bool) -> None:
        """A program is about to run. whole: its backward leaves nothing for later, which passes do not either."""
        self.under_way.clear()
        self.whole = whole

    def forward(self, module: Module, tape: Tape, x: Tensor | None, batch: MicroBatch, drop_cheap: bool) -> Tensor:
        """The module's forward on a tape. drop_cheap: keep no activations that are cheap to make again."""
        fits = self.on and self.whole and module.replayable and tape.recording and not tape.fp8 and batch.cache is None
        if not fits or x is None or x.data.nbytes > SMALL:
            return _forward(module, tape, x, batch, drop_cheap)
        key = module.name, x.data.shape, batch.segments is None, batch.positions is None, drop_cheap
        found = self.passes.get(key)
        if isinstance(found, Pass):
            self.replayed += 1
            return found.forward(tape, x, batch)
        recorder = self.device.recorder() if found == "seen" else None
        if recorder is None:
            if found is None or found == "seen":
                self.passes[key] = "the device does not replay" if found else "seen"
            return _forward(module, tape, x, batch, drop_cheap)
        recorder.start(self._places(module, x, None, batch), lasting=module.lasting)
        with _until_the_end(recorder, tape):
            y = _forward(module, tape, x, batch, drop_cheap)
        tape.after_op()
        self.under_way[tape] = key, recorder, module, x, batch
        return y

    def backward(self, tape: Tape, y: Tensor, dy: Array | float, inputs_only: bool) -> None:
        """`Tape.backward`."""
        if tape not in self.under_way:
            tape.backward(y, dy, inputs_only)
            return
        key, recorder, module, x, batch = self.under_way.pop(tape)
        if recorder.refused:
            tape.backward(y, dy)
        self.passes[key] = recorder.refused or self._recorded(tape, recorder, module, x, y, batch, dy)

    def _recorded(self, tape: Tape, before: Recorder, module: Module, x: Tensor, y: Tensor, batch: MicroBatch, dy: Array) -> Pass | str:
        """Do backward and record it; then try what has been recorded."""
        stage = self.stages[module.name]
        places = lambda x, y, batch: self._places(module, x, y, batch)  # noqa: E731
        gradients = lambda: [gradient.full for name in stage.gradients if (gradient := self.units[name].gradients)]  # noqa: E731
        # Forward once more, in memory full of NaN; its own arrays are all there still.
        forwards = before.stop([(y.data, Y)])
        again = Tensor(_nan(self.device, y.data))
        kept = _bytes(self.device, forwards.kept_bytes, fill=True)
        forwards.run(kept, _bytes(self.device, forwards.scratch_bytes, fill=True), places(x, again, batch))
        if not (_same(again.data, y.data) and before.kept_alike(kept)):
            tape.backward(y, dy)
            return "forward does more than its kernels"

        buffers = gradients()
        started = {id(p): p.grad_started for p in module.parameters}
        copies = [np.copy(array) for array in (dy, *buffers)]
        recorder = self.device.recorder()
        assert recorder is not None
        given = [*places(x, y, batch), dy, None, *buffers]
        recorder.start(given, buffers, module.lasting, before)
        with _until_the_end(recorder, tape):
            tape.backward(y, dy)
        learning = [p for p in module.parameters if p.trainable and p.grad_started]
        accumulated = {started[id(p)] for p in learning}
        if recorder.refused or len(accumulated) > 1:
            return recorder.refused or "gradients of one pass are added and overwritten"
        dx = "" if x.grad is None else "dy" if _at_one_place(x.grad, dy) else "new"
        backwards = recorder.stop([(x.grad, len(places(x, y, batch)) + 1)] if dx == "new" else [])
        results = [np.copy(array) for array in (dy, *buffers)]
        for array, copy in zip((dy, *buffers), copies, strict=True):
            array[...] = copy
        new = _nan(self.device, x.grad) if dx == "new" else None
        backwards.run(kept, _bytes(self.device, backwards.scratch_bytes, fill=True), [*places(x, y, batch), dy, new, *buffers],
                      any(accumulated))
        alike = all(map(_same, (dy, *buffers), results)) and (new is None or _same(new, x.grad))
        if not alike:
            for array, result in zip((dy, *buffers), results, strict=True):
                array[...] = result
            return "backward does more than its kernels"
        return Pass(self.device, places, gradients, self._scratch, forwards, backwards, y.data.shape, y.data.dtype, dx, learning)

    def _scratch(self, nbytes: int) -> Array:
        """At least so many bytes, the same ones for all passes: none needs them when it is over."""
        if self.scratch is None or self.scratch.nbytes < nbytes:
            self.scratch = _bytes(self.device, nbytes)
        return self.scratch

    def _places(self, module: Module, x: Tensor, y: Tensor | None, batch: MicroBatch) -> list[Array | None]:
        return [x.data, None if y is None else y.data, batch.segments, *(self.units[name].full for name in self.stages[module.name].reads)]


@contextmanager
def _until_the_end(recorder: Recorder, tape: Tape) -> Iterator[None]:
    """Records what happens inside, without progress: that is not the pass's."""
    after_op, tape.after_op = tape.after_op, lambda: None
    try:
        yield
    finally:
        recorder.end()
        tape.after_op = after_op


def _forward(module: Module, tape: Tape, x: Tensor | None, batch: MicroBatch, drop_cheap: bool) -> Tensor:
    y = module.forward(tape, x, batch)
    if drop_cheap:
        tape.drop_cheap()
    return y


def _bytes(device: Device, nbytes: int, fill: bool = False) -> Array:
    """Memory of a pass. fill: with the bytes of NaN."""
    memory = device.empty(nbytes, np.uint8)
    if fill:
        memory.fill(0xFF)
    return memory


def _nan(device: Device, like: Array) -> Array:
    return _bytes(device, like.nbytes, fill=True).view(like.dtype).reshape(like.shape)


def _same(a: Array, b: Array) -> bool:
    """Whether two contiguous arrays agree in every bit."""
    return bool(np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)))


def _at_one_place(a: Array, b: Array) -> bool:
    return a.nbytes == b.nbytes and np.may_share_memory(a, b)
