"""Memory, streams and kernel launches of the CuPy device.

Note on streams. Arithmetic is issued on one stream, `compute`, and runs in the order of its issue; the host goes on at
once. Copies to and from pinned host memory are issued on a second one, `copies`. What one stream must not overtake on
the other, or the host on either, is said with an event: recorded on a stream, it is done when everything issued there
before is done. The host waits nowhere but in `synchronise`, `to_host`, `read`, and for the events it asks about.

Note on lifetimes. CuPy's pool hands a freed block out again while kernels that use it may still be waiting to run.
On one stream that is right, since the next user's kernels run after them. So every array is made on the compute
stream, and whoever copies to or from one on the other stream keeps it until that copy's event is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import cupy
import numpy as np

from mpshard.device import cupy_source
from mpshard.device.base import Array, Kind, Memory

UPLOAD = 1 << 20  # bytes: smaller arrays go through pinned memory without waiting; larger ones come once, at the start
SHARED_LIMIT = 48 << 10  # bytes of shared memory a kernel may use without asking


class Account:
    """Bytes of the arrays that are held, by kind: what was asked for, without what the pool rounds up or keeps free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = dict.fromkeys(Kind, 0)
        self._peak = dict.fromkeys(Kind, 0)
        self._total = self._total_peak = 0
        self._returned: deque[tuple[Kind, int]] = deque()  # a lease may die inside any call: it only appends here

    def current(self, kind: Kind | None = None) -> int:
        """Bytes held now, of one kind or in all."""
        with self._lock:
            self._settle()
            return self._total if kind is None else self._current[kind]

    def peak(self, kind: Kind | None = None) -> int:
        """Most bytes ever held at once since the start or `reset_peak`; for None the peak of the total."""
        with self._lock:
            return self._total_peak if kind is None else self._peak[kind]

    def reset_peak(self) -> None:
        """Start counting peaks anew, from what is held now."""
        with self._lock:
            self._settle()
            self._peak, self._total_peak = dict(self._current), self._total

    def count(self, kind: Kind, nbytes: int) -> None:
        """Take `nbytes` into the account."""
        with self._lock:
            self._settle()
            self._add(kind, nbytes)
            self._peak[kind] = max(self._peak[kind], self._current[kind])
            self._total_peak = max(self._total_peak, self._total)

    def give_back(self, kind: Kind, nbytes: int) -> None:
        self._returned.append((kind, nbytes))

    def _settle(self) -> None:
        while self._returned:
            kind, nbytes = self._returned.popleft()
            self._add(kind, -nbytes)

    def _add(self, kind: Kind, nbytes: int) -> None:
        self._current[kind] += nbytes
        self._total += nbytes


class _Lease:
    """One block of the pool. Arrays refer to it through their memory; when the last view dies it goes back."""

    __slots__ = ("device", "kind", "nbytes", "pointer")

    def __init__(self, device: CupyMemory, pointer: Any, nbytes: int, kind: Kind) -> None:
        self.device, self.pointer, self.nbytes, self.kind = device, pointer, nbytes, kind

    def __del__(self) -> None:
        if not hasattr(self, "kind"):  # a signal's exception came while it was made
            return
        if self.device.poison:
            self.pointer.memset_async(0xFF, self.nbytes, self.device.compute)
        self.device.account.give_back(self.kind, self.nbytes)


class CupyMemory:
    """The memory part of `mpshard.device.base.Device` and the rest of `Accelerator`; the kernels' class builds on it.

    Its compute stream becomes the current one of the thread that opens it, on which CuPy issues all work: so a process has
    one device, used by that thread.

    Parameters
    ----------
    poison: for tests: memory handed out or given back is filled with 0xFF bytes, NaN in every format.
    node_rank, node_ranks: this rank's number among those of its node, and how many they are: picks one of the node's
        GPUs, all of which stay visible. Several ranks may share one; `about` says so.
    """

    name = "cupy"
    on_host = False
    xp: ModuleType = cupy

    def __init__(self, poison: bool = False, node_rank: int = 0, node_ranks: int = 1) -> None:
        self.poison = poison
        gpus = cupy.cuda.runtime.getDeviceCount()
        self.index = node_rank % gpus
        kind = cupy.cuda.runtime.getDeviceProperties(self.index)["name"].decode()
        self.about = f"cupy on {kind}" + (f", {gpus} for the {node_ranks} ranks of a node" if node_ranks > gpus else "")
        cupy.cuda.Device(self.index).use()
        # Not blocking: the legacy default stream, which nobody here uses, then orders nothing behind our backs.
        self.compute, self.copies = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        self.compute.use()
        self.account = Account()
        self.memory: Memory = self.account
        self._pool = cupy.get_default_memory_pool()
        self._uploads: deque[tuple[Any, np.ndarray]] = deque()  # pinned memory that a copy may still be reading
        self._kernels: dict[Any, Any] = {}
        self._modules: dict[Any, Any] = {}

    # -- arrays ------------------------------------------------------------------------------
    def empty(self, shape: int | tuple[int, ...], dtype: Any, kind: Kind = Kind.ACTIVATION) -> Array:
        dtype = np.dtype(dtype)
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(extent) for extent in shape)
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        if nbytes == 0:
            return cupy.ndarray(shape, dtype)
        pointer = self._pool.malloc(nbytes)
        self.memory.count(kind, nbytes)
        if self.poison:
            pointer.memset_async(0xFF, nbytes, self.compute)
        memory = cupy.cuda.UnownedMemory(pointer.ptr, nbytes, _Lease(self, pointer, nbytes, kind), self.index)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def zeros(self, shape: int | tuple[int, ...], dtype: Any, kind: Kind = Kind.ACTIVATION) -> Array:
        out = self.empty(shape, dtype, kind)
        self.zero(out)
        return out

    def zero(self, array: Array) -> None:
        """Fill a contiguous array with zero bytes, which are zero in every type."""
        if array.nbytes:
            array.data.memset_async(0, array.nbytes, self.compute)

    def from_host(self, array: Any, kind: Kind = Kind.ACTIVATION) -> Array:
        array = np.asarray(array)
        out = self.empty(array.shape, array.dtype, kind)
        if out.nbytes == 0:
            return out
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if words.size > UPLOAD:
            out.data.copy_from_host_async(words.ctypes.data, words.size, self.compute)
            self.compute.synchronize()
            return out
        while self._uploads and self._uploads[0][0].done:
            self._uploads.popleft()
        pinned = self.pinned(words.size)
        pinned[:] = words
        out.data.copy_from_host_async(pinned.ctypes.data, words.size, self.compute)
        self._uploads.append((self.record(), pinned))
        return out

    def to_host(self, array: Array) -> Any:
        if isinstance(array, np.ndarray):  # copied before
            return array
        return array.get(stream=self.compute)  # which may not be the calling thread's

    def host_bytes(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def read(self, scalars: Sequence[Any]) -> np.ndarray:
        if not scalars:
            return np.zeros(0)
        return cupy.concatenate([scalar.reshape(1) for scalar in scalars]).get()

    # -- order -------------------------------------------------------------------------------
    def recorder(self) -> Any:
        return None

    def synchronise(self) -> None:
        self.compute.synchronize()
        self.copies.synchronize()

    def record(self) -> Any:
        return self._record(self.compute)

    def wait(self, event: Any) -> None:
        self.compute.wait_event(event)

    def mark(self) -> Any:
        event = cupy.cuda.Event()
        event.record(self.compute)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return cupy.cuda.get_elapsed_time(start, end) / 1000

    def _record(self, stream: Any) -> Any:
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    # -- staging -----------------------------------------------------------------------------
    def pinned(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def download(self, array: Array, host: np.ndarray, after: Sequence[Any] = ()) -> Any:
        for event in after:
            self.copies.wait_event(event)
        array.data.copy_to_host_async(host.ctypes.data, array.nbytes, self.copies)
        return self._record(self.copies)

    def upload(self, host: np.ndarray, array: Array, after: Sequence[Any] = ()) -> Any:
        for event in after:
            self.copies.wait_event(event)
        array.data.copy_from_host_async(host.ctypes.data, array.nbytes, self.copies)
        return self._record(self.copies)

    # -- kernels -----------------------------------------------------------------------------
    def launch(self, kernel: str, grid: tuple[int, ...], block: int, args: tuple[Any, ...], *types: Any,
               shared: int = 0, **constants: int) -> None:
        """Issue a kernel of `cupy_kernels/` on the compute stream.

        types: dtypes for the file's T, U, V. shared: bytes of dynamic shared memory. constants: TILE, HEAD.
        """
        key = (kernel, tuple(np.dtype(dtype).name for dtype in types), tuple(constants.items()))
        function = self._kernels.get(key) or self._build(key, constants)
        if shared > SHARED_LIMIT and function.max_dynamic_shared_size_bytes < shared:
            function.max_dynamic_shared_size_bytes = shared
        function(grid, (block,), args, shared_mem=shared)

    def _elementwise(self, kernel: str, size: int, args: tuple[Any, ...], *types: Any) -> None:
        """Launch a kernel whose threads walk together over `size` elements."""
        if size:
            self.launch(kernel, (min(-(-size // 1024), 1 << 14),), 256, args, *types)  # four elements a thread or more

    def _build(self, key: tuple[str, tuple[str, ...], Any], constants: dict[str, int]) -> Any:
        kernel, types, _ = key
        for name in types:
            if name not in cupy_source.C_TYPES:
                raise TypeError(f"the kernels have no type {name}; use one of {', '.join(cupy_source.C_TYPES)}")
        file, options = cupy_source.kernels()[kernel], cupy_source.options(types, **constants)
        if not cupy.cuda.runtime.is_hip:
            options += cupy_source.NVRTC_OPTIONS
        if (file, options) not in self._modules:
            self._modules[file, options] = cupy.RawModule(code=cupy_source.source(file), options=options)
        self._kernels[key] = self._modules[file, options].get_function(kernel)
        return self._kernels[key]


def orientation(x: Array) -> tuple[int, int]:
    """Of a matrix whose rows or columns are contiguous: (is it a transposed view?, elements from one to the next)."""
    across, down = x.strides[1] // x.itemsize, x.strides[0] // x.itemsize
    if across == 1:
        return 0, max(down, x.shape[1])
    if down == 1:
        return 1, max(across, x.shape[0])
    raise ValueError(f"a product needs contiguous rows or columns, not strides {x.strides} of {x.shape}")
