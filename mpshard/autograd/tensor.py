"""Tensors, parameters and the tape: reverse-mode differentiation in one short loop.

A tape belongs to one module and one micro-batch. Each operation appends one entry: the rule that
knows its gradient, the tensor it made, and what the rule needs. A rule holds the `Parameter`, never
its array: by the time backward runs, the full weights have been freed and gathered again, and the
old memory is some other unit's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from mpshard.device.base import Array, Device


class Tensor:
    """An activation: its array, and during backward the gradient gathered so far (same shape).

    remake: how to compute the array again from what its operation kept, for those that are cheap to make and large to
    keep (norms, activations): it may be dropped between forward and backward.
    wants_grad: False where nothing that learns lies behind it, so that its gradient would be work for nobody.
    """

    __slots__ = ("_data", "grad", "remake", "wants_grad")

    def __init__(self, data: Array | None, remake: Callable[[], Array] | None = None, wants_grad: bool = True) -> None:
        self._data, self.remake, self.wants_grad = data, remake, wants_grad
        self.grad: Array | None = None

    @property
    def data(self) -> Array:
        if self._data is None and self.remake is not None:
            self._data = self.remake()
        return self._data

    @data.setter
    def data(self, data: Array | None) -> None:
        self._data = data

    @property
    def holds(self) -> Array | None:
        """The array, if it is there: nothing is made again."""
        return self._data

    def accumulate(self, grad: Array, device: Device) -> None:
        """Add `grad`, which from now on belongs to this tensor."""
        if not self.wants_grad:
            return
        if self.grad is None:
            self.grad = grad
        else:
            device.add(self.grad, grad)


class Activated(Tensor):
    """The result of a GELU. of: what it was taken of, if by the tanh form: some products make that one's gradient at once."""

    __slots__ = ("of",)

    of: Tensor | None


class Parameter:
    """A named weight. Its array exists only while the unit that stores it is gathered.

    Parameters
    ----------
    name: the tensor's name in a Hugging Face checkpoint.
    shape: in Hugging Face's orientation; () is a scalar, zero sizes are allowed.
    init: how its first values are drawn (see `mpshard.nn.init`).
    parts: for a fused parameter, the neighbours in storage that it spans, stacked on axis 0.
    transposed: a linear map's matrix stored (inputs, outputs).
    """

    def __init__(self, name: str, shape: tuple[int, ...], init: Any = None, parts: Sequence[Parameter] = (),
                 transposed: bool = False) -> None:
        self.name, self.shape, self.init, self.parts, self.transposed = name, tuple(shape), init, tuple(parts), transposed
        self.trainable = True  # to be set before the model is sharded
        self.adapter: Adapter | None = None
        self.apart = False  # fused: its parts lie in different units (some frozen), so it cannot be read as one
        self._data: Array | None = None
        self.grad: Array | None = None
        self.grad_started = False  # False: the gradient buffer still holds an older unit's numbers

    @classmethod
    def fuse(cls, name: str, parts: Sequence[Parameter]) -> Parameter:
        """One view over parameters that lie next to each other (q, k, v; gate, up): one product instead of several."""
        rows = sum(part.shape[0] for part in parts)
        return cls(name, (rows, *parts[0].shape[1:]), parts=parts)

    @property
    def size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size

    @property
    def learns(self) -> bool:
        """Whether it, or any of its parts, gets a gradient."""
        return any(part.trainable for part in self.parts) if self.parts else self.trainable

    @property
    def data(self) -> Array:
        """The full weight; an error names it if its unit is not gathered."""
        if self._data is None:
            raise RuntimeError(f"{self.name} was read while its unit is not gathered")
        return self._data

    def bind(self, data: Array | None) -> None:
        self._data = data

    def bind_grad(self, grad: Array | None) -> None:
        """Attach (or with None detach) the buffer that this micro-batch's gradient is written to."""
        self.grad, self.grad_started = grad, False

    def grad_target(self) -> tuple[Array | None, bool]:
        """The gradient's buffer and whether to add to it: the first writer overwrites, so nothing is ever zeroed."""
        accumulate, self.grad_started = self.grad_started, True
        for part in self.parts:
            part.grad_started = True
        return self.grad, accumulate

    def __repr__(self) -> str:
        return f"Parameter({self.name}, {self.shape})"


def bind_all(parameters: Sequence[Parameter], arrays: Sequence[Array | None]) -> None:
    """`Parameter.bind` for each: a step does it some thousand times."""
    for parameter, array in zip(parameters, arrays, strict=True):
        parameter._data = array


def bind_all_grads(parameters: Sequence[Parameter], grads: Sequence[Array | None]) -> None:
    """`Parameter.bind_grad` for each."""
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad, parameter.grad_started = grad, False


class Adapter(NamedTuple):
    """What a linear map's weight W (o, i) is changed by: W + scale * b @ a, with a (r, i), b (o, r).

    dropout: the probability with which an element of the adapter's input is dropped in training.
    """

    a: Parameter
    b: Parameter
    scale: float
    dropout: float


Rule = Callable[..., None]


def _tensors(saved: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors among what a rule keeps, or in lists within."""
    for value in saved:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _learn(saved: Sequence[Any]) -> bool:
    """Whether anything among what a rule keeps, or in lists within, wants a gradient."""
    return any(value.wants_grad if isinstance(value, Tensor) else value.learns if isinstance(value, Parameter)
               else isinstance(value, list | tuple) and _learn(value) for value in saved)


class Tape:
    """Records the operations of one module on one micro-batch and runs them backwards.

    Parameters
    ----------
    device: does the arithmetic.
    recording: keep what backward needs.
    training: dropout is active.
    key: what randomness depends on, (seed, step, global micro-batch, module); each random operation adds its number.
    after_op: called after every operation in both directions; the engine makes MPI progress there.
    fp8: the products of linear layers round their inputs to 8 bits.
    """

    def __init__(self, device: Device, recording: bool = True, training: bool = True, key: tuple[Any, ...] = (),
                 after_op: Callable[[], None] | None = None, fp8: bool = False) -> None:
        self.device, self.recording, self.training, self.key, self.fp8 = device, recording, training, key, fp8
        self.after_op = after_op or (lambda: None)
        self.entries: list[tuple[Rule, Tensor, tuple[Any, ...]]] = []
        self.later: list[Callable[[], None]] | None = None  # while inputs' gradients go first: what makes the weights'
        self.random_ops = 0

    def record(self, result: Array | Tensor | None, rule: Rule, *saved: Any) -> Tensor:
        """Wrap an operation's result; keep its rule and what that needs, unless nothing is recorded or nothing that the
        operation read learns."""
        out = result if isinstance(result, Tensor) else Tensor(result)
        out.wants_grad = False  # for now: some rules keep their own result
        out.wants_grad = _learn(saved)
        if self.recording and out.wants_grad:
            self.entries.append((rule, out, saved))
        self.after_op()
        return out

    def backward(self, output: Tensor, grad: Array | float, inputs_only: bool = False) -> None:
        """Run the rules in reverse. Entries are dropped as they are used, so activations are freed on the way.

        inputs_only: leave the products that make weights' gradients, which nothing here waits for, to `backward_weights`.
        """
        self.later = [] if inputs_only else None
        output.grad = grad
        while self.entries:
            rule, out, saved = self.entries.pop()
            dy, out.grad = out.grad, None
            if dy is not None:
                rule(self, dy, *saved)
            del out, saved, dy
            self.after_op()

    def for_weights(self, action: Callable[[], None]) -> None:
        """Of a rule: do what fills gradient buffers and nothing else, now or in `backward_weights`. What it reads must not be
        written to by later rules."""
        if self.later is None:
            action()
        else:
            self.later.append(action)

    def backward_weights(self) -> None:
        """Do what a backward of inputs only has left."""
        left, self.later = self.later or [], None
        for action in left:
            action()
            self.after_op()

    def drop_cheap(self) -> None:
        """Let go of the results that can be made again. Backward makes each once more, when it first needs it."""
        for _, out, _ in self.entries:
            if out.remake is not None:
                out.data = None

    def kept(self) -> list[Tensor]:
        """What rules will read in backward."""
        return list({id(tensor): tensor for _, _, saved in self.entries for tensor in _tensors(saved)}.values())

    def drop_unread(self) -> None:
        """Let go of the results that no rule here will read: only whoever follows this tape still needs the last one."""
        read = {id(tensor) for tensor in self.kept()}
        for _, out, _ in self.entries:
            if id(out) not in read:
                out.data = None

    def random_key(self) -> tuple[int, int]:
        """Two uint32 for the next random operation: a function of the tape's key and the operation's number only."""
        digest = hashlib.blake2b(repr((self.key, self.random_ops)).encode(), digest_size=8).digest()
        self.random_ops += 1
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
