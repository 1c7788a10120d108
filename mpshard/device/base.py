"""What the rest of mpshard asks of a device: memory, kernels, synchronisation.

Two rooms would be enough to port mpshard to new hardware: write this protocol again, and
(if its memory is not the host's) a transport. Everything above works on whatever `Array` a
device hands out and never names NumPy or CuPy.

Note on names. b, t: sequences and positions of a micro-batch; n = b * t tokens; d: width;
h, k: query heads and key/value heads; e: width of one head; f: width of the MLP; v: vocabulary.
Arrays are row-major and contiguous unless a docstring says otherwise. "Adds into": with
`accumulate=False` the target's old content is ignored and overwritten, with True it is summed;
so the first gradient of a micro-batch costs no zeroing and no extra pass.

Note on who may write where. A kernel writes only into what it returns, its `out` arguments and
arguments documented as "in place". In particular a backward kernel never writes into `dy`: the
residual stream hands the same gradient to two readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mpshard.device.replay import Recorder

Array = Any  # numpy.ndarray, or cupy.ndarray on a GPU: the two share their interface, not a base class


class Kind(StrEnum):
    """What a buffer is for; the byte accounting keeps one current and one peak figure for each."""

    PARAMETER = "parameter"  # this rank's slice of the weights (masters)
    GRADIENT = "gradient"  # this rank's slice of the summed gradients
    MOMENT = "moment"  # this rank's slice of the optimizer's moments
    GATHERED = "gathered"  # full units, alive only around their compute
    FULL_GRADIENT = "full_gradient"  # gradients of full units, alive until they are reduced
    STAGING = "staging"  # buffers that messages pass through
    ACTIVATION = "activation"  # everything a forward or backward pass makes

    __hash__ = str.__hash__  # an Enum's own is written in Python, and every array asks for it


class Memory(Protocol):
    """Bytes held, by kind. `current`/`peak` of None is the sum over kinds (its own peak, not a sum of peaks)."""

    def current(self, kind: Kind | None = None) -> int: ...

    def peak(self, kind: Kind | None = None) -> int: ...

    def reset_peak(self) -> None: ...

    def count(self, kind: Kind, nbytes: int) -> None:
        """Take memory into the account that somebody else holds for this rank (a shared window)."""


class Epilogues(Protocol):
    """Products that do what comes next before they are written. Where there is none for a case they do nothing, and `matmul`
    and kernels are to do it. GELU is the tanh form.
    """

    def gelu(self, a: Array, b: Array, bias: Array, keep: bool) -> tuple[Array, Array | None] | None:
        """gelu(a (m, k) @ b (k, n) + bias (n,)) -> (m, n), and what it was taken of, if that is to be kept; None: not done."""

    def gelu_backward(self, dy: Array, b: Array, x: Array) -> Array | None:
        """(dy (m, k) @ b (k, n)) * gelu'(x (m, n)) -> (m, n): the gradient of what a GELU was taken of; None: not done."""

    def linear_gradients(self, dy: Array, x: Array, weight: Array, bias: Array, transposed: bool) -> bool:
        """weight (o, i) = dy (n, o).T @ x (n, i), or (i, o) = x.T @ dy if transposed; bias (o,) = sum of dy's rows. Both are
        overwritten. False: not done."""


class Device(Protocol):
    """One rank's compute device. Sizes in elements, memory in bytes."""

    name: str
    about: str  # for the user: which device, and how it was set
    xp: ModuleType
    memory: Memory
    poison: bool  # tests: fill with NaN whatever is handed out uninitialised or given back
    on_host: bool  # arrays are the host's memory and calls return when their work is done; else see `Accelerator`
    epilogues: Epilogues | None  # of a library; None: it has none

    @property
    def fp8_products(self) -> str:
        """For the user: "by" what `matmul_fp8` is done."""

    # -- memory ------------------------------------------------------------------------------
    def empty(self, shape: int | tuple[int, ...], dtype: Any, kind: Kind = Kind.ACTIVATION) -> Array:
        """An uninitialised array from the pool; its block goes back when the last view of it dies."""

    def zeros(self, shape: int | tuple[int, ...], dtype: Any, kind: Kind = Kind.ACTIVATION) -> Array: ...

    def from_host(self, array: Any, kind: Kind = Kind.ACTIVATION) -> Array:
        """A copy of a NumPy array on the device (same dtype)."""

    def to_host(self, array: Array) -> Any:
        """A NumPy array with the same values; of one that is in the host's memory the same memory."""

    def host_bytes(self, nbytes: int) -> Any:
        """Uninitialised memory of the host for files to pass through, as a NumPy array of bytes."""

    def read(self, scalars: Sequence[Any]) -> Any:
        """The values that `sum_of_squares` and `cross_entropy` returned, as one float64 NumPy array: a step's one wait."""

    def synchronise(self) -> None:
        """Return when everything issued so far has been done."""

    def recorder(self) -> Recorder | None:
        """Who writes down the kernels of a pass, so that they can be called again; None where they cannot."""

    # -- dense -------------------------------------------------------------------------------
    def matmul(self, a: Array, b: Array, out: Array | None = None, accumulate: bool = False, bias: Array | None = None) -> Array:
        """(m, k) @ (k, n) -> (m, n), with bias (n,) on every row. `a` and `b` may be transposed views: no copy is made of either."""

    def matmul_fp8(
        self, a: Array, b: Array, gradients: tuple[bool, bool] = (False, False), out: Array | None = None,
        accumulate: bool = False, bias: Array | None = None,
    ) -> Array:
        """As `matmul`, of a and b rounded to 8 bits: to e4m3, those that are gradients to e5m2, which has more range and a bit less.

        Each is multiplied by the power of two that brings its largest element just under the format's largest number (448 or
        57344), rounded to the nearest, ties to even, and brought back: nothing overflows and the scale itself is exact. What
        is returned, sums and bias are as without. A matrix that holds what is not finite becomes NaN as a whole. gradients:
        whether a is one, whether b is one, not both. Micikevicius et al. 2022 (arXiv:2209.05433), section 3.
        """

    def add_bias(self, y: Array, bias: Array) -> None:
        """y (n, d) += bias (d,), in place."""

    def add(self, out: Array, x: Array) -> None:
        """out += x, in place, same shape."""

    def column_sum(self, dy: Array, out: Array, accumulate: bool) -> None:
        """Adds the sum of dy (n, d) over rows into out (d,): the gradient of a bias."""

    # -- embedding ---------------------------------------------------------------------------
    def embedding(self, ids: Array, table: Array) -> Array:
        """table (v, d)[ids (b, t) int] -> (b, t, d)."""

    def add_positions(self, x: Array, positions: Array) -> None:
        """x (b, t, d) += positions (>= t, d)[:t], in place."""

    def embedding_backward(self, dy: Array, ids: Array, out: Array, accumulate: bool) -> None:
        """Adds rows of dy (b, t, d) into out (v, d) at ids (b, t), in an order fixed by ids alone."""

    def positions_backward(self, dy: Array, out: Array, accumulate: bool) -> None:
        """Adds dy (b, t, d) summed over b into out (>= t, d)[:t]; rows past t get zero or stay."""

    # -- normalisation -----------------------------------------------------------------------
    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array]:
        """x (..., d) -> y (..., d), stats (2, n): mean and 1/standard deviation of each row.

        Ba, Kiros, Hinton 2016 (arXiv:1607.06450), eq. 4; the variance is the biased one.
        """

    def layer_norm_backward(
        self, dy: Array, x: Array, weight: Array, stats: Array,
        dweight: Array | None, dbias: Array | None, accumulate: bool, dx: Array | None,
    ) -> Array:
        """Gradients of `layer_norm`. dweight, dbias (d,): added into (None: not wanted).

        dx: None for a new array, or the gradient x already has, which is added to in the same pass.
        """

    def rms_norm(self, x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """x (..., d) -> y (..., d), stats (n,): 1/rms of each row. Zhang, Sennrich 2019 (arXiv:1910.07467), eq. 4."""

    def rms_norm_backward(
        self, dy: Array, x: Array, weight: Array, stats: Array,
        dweight: Array | None, accumulate: bool, dx: Array | None,
    ) -> Array:
        """As `layer_norm_backward`."""

    # -- activations -------------------------------------------------------------------------
    def gelu(self, x: Array, approximate: bool) -> Array:
        """x * Phi(x) -> new array; `approximate`: the tanh form. Hendrycks, Gimpel 2016 (arXiv:1606.08415)."""

    def gelu_backward(self, dy: Array, x: Array, approximate: bool, y: Array | None = None) -> Array:
        """-> dx. `y` = gelu(x), where the caller still has it (the next product's input), may save the exponential."""

    def swiglu(self, gate_up: Array) -> Array:
        """(n, 2f) holding gate and up side by side -> (n, f): silu(gate) * up.

        Shazeer 2020 (arXiv:2002.05202), eq. 6.
        """

    def swiglu_backward(self, dy: Array, gate_up: Array, y: Array | None = None) -> Array:
        """-> (n, 2f). `y` = swiglu(gate_up), as in `gelu_backward`."""

    # -- attention ---------------------------------------------------------------------------
    def rotary(self, qkv: Array, heads: int, kv_heads: int, cos: Array, sin: Array, inverse: bool = False) -> None:
        """Turns the query and key heads of qkv (b, t, (h + 2k) e), in place, by each position's angles.

        cos, sin (t, e/2), or (b, t, e/2) where positions differ between sequences. Hugging Face's
        arrangement: element j of a head is paired with j + e/2. `inverse` turns back, which is the gradient.
        Su et al. 2021 (arXiv:2104.09864), eq. 34.
        """

    def attention(
        self, qkv: Array, heads: int, kv_heads: int, scale: float, segments: Array | None = None
    ) -> tuple[Array, Array]:
        """Causal attention of qkv (b, t, (h + 2k) e) -> y (b, t, h e), lse (b, h, t).

        In qkv lie h query heads, k key heads, k value heads; query head i reads key/value head i // (h/k).
        lse: log-sum-exp of each query's scores, all that backward needs. Blocked over queries, keys above
        the diagonal skipped, never a t x t matrix. Dao 2023 (arXiv:2307.08691), algorithm 1.
        segments (b, t) int32: a query sees only keys of its own segment (packed documents). None: one segment.
        """

    def attention_backward(
        self, dy: Array, qkv: Array, y: Array, lse: Array, heads: int, kv_heads: int, scale: float,
        segments: Array | None = None,
    ) -> Array:
        """-> dqkv, laid out as qkv. Scores are computed again, block by block. Same paper, algorithm 2."""

    def cached_attention(
        self, qkv: Array, cache: Array, past: int, heads: int, kv_heads: int, scale: float
    ) -> Array:
        """Causal attention of qkv (b, t, (h + 2k) e) over `past` earlier positions and its own t -> y (b, t, h e).

        cache (b, >= past + t, 2k e): keys and values of the earlier positions; those of qkv are put behind them. For
        sampling: a few positions at a time (t scores a key), or, with past = 0, a whole prompt.
        """

    # -- loss --------------------------------------------------------------------------------
    def cross_entropy(
        self, x: Array, table: Array, targets: Array, ignore_index: int,
        scale: float, dtable: Array | None, accumulate: bool, want_dx: bool,
    ) -> tuple[float, Array | None]:
        """Sum of -log softmax(x @ table.T)[target] over valid tokens, in chunks: no (n, v) matrix is kept.

        x (n, d), table (v, d), targets (n,) int64 with `ignore_index` where there is nothing to learn.
        The logits exist one chunk of tokens at a time and are needed for the value and for the gradient, so
        both are made in the same pass: dx (n, d) is returned if wanted, dtable (v, d) is added into (None: not wanted),
        both times `scale`; the value is not scaled. The sum is kept in float64. Tokens with `ignore_index` cost no
        product.
        Returns a host float here; on a GPU a 0-d array, read once a step.
        """

    # -- dropout -----------------------------------------------------------------------------
    def dropout(self, x: Array, probability: float, key: tuple[int, int], out: Array | None = None) -> Array:
        """x with elements zeroed with `probability`, the others divided by 1 - probability -> new array or `out`.

        The mask is a function of (key, flat element index) alone and the same on every device: so backward is the same
        call on dy, and nothing is kept. key: two uint32.
        """

    # -- optimizer and sums ------------------------------------------------------------------
    def adamw(
        self, weight: Array, gradient: Array, moment1: Array, moment2: Array, *,
        lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: float,
    ) -> None:
        """One AdamW update of four flat arrays of one size, in place, blocked; `gradient` is left as it is.

        Loshchilov, Hutter 2017 (arXiv:1711.05101), algorithm 2, with torch.optim.AdamW's order of operations
        (decay first, bias corrections from `step`, counted from 1). The gradient enters times `gradient_scale`.
        """

    def blend(self, out: Array, x: Array, keep: float, share: float) -> None:
        """out = keep * out + share * x, in place, one shape; x may be `out`. With keep 0 its old content is ignored."""

    def round_at_random(self, x: Array, out: Array, key: tuple[int, int], start: int) -> None:
        """x (n,) float32 to out (n,) bfloat16; what lies between two goes to either, so that it is right on average.

        16 random bits are added below those that stay, and what is below them is cut off: a function of (key, start +
        index) alone, from `dropout`'s generator. The range must not cross a multiple of 2^32. Gupta et al. 2015
        (arXiv:1502.02551), section 3. x may be overwritten.
        """

    def cast(self, x: Array, out: Array) -> None:
        """out = x in out's dtype, same shape; rounded to the nearest, ties to even, overflow to infinity."""

    def pack_fp8(self, x: Array, words: Array) -> None:
        """x (n,) to words (n + blocks,) uint8: the elements as e4m3, then a scale's exponent + 127 for each block of 128.

        A block is multiplied by the power of two that brings its largest element just under the format's largest number, 448,
        so nothing overflows and the scale itself is exact. A block that holds what is not finite becomes NaN as a whole.
        Rouhani et al. 2023 (arXiv:2310.10537).
        """

    def unpack_fp8(self, words: Array, out: Array, slices: int) -> None:
        """Words of `slices` slices, end to end, to out (slices * n,) in its type."""

    def sum_of_squares(self, x: Array) -> float:
        """Sum of x[i]^2 of a flat array, in float64 from blocks."""

    def ordered_sum(self, parts: Sequence[Array], out: Array, accumulate: bool) -> None:
        """out (m,) = or += parts[0] + parts[1] + ..., arrays (m,) or rows of one (world, m), in out's precision.

        In a fixed binary tree: the first half (the largest power of two below their number) plus the rest, likewise
        summed. So the sum of 4 is the sum of the two sums of 2, whoever made those.
        """


class Event(Protocol):
    """A point in the work of a device."""

    done: bool  # whether everything before it has been done

    def synchronize(self) -> None:
        """Return when it has."""


class Accelerator(Device, Protocol):
    """A device that works while the host goes on, in memory of its own. What transports need of it.

    A device computes in one order; copies to and from pinned host memory run beside, in an order of their own.
    """

    def record(self) -> Event:
        """The point that the device's arithmetic has been issued to."""

    def wait(self, event: Event) -> None:
        """Arithmetic issued from now on runs after the event. The host does not wait."""

    def mark(self) -> Event:
        """As `record`, for `seconds`."""

    def seconds(self, start: Event, end: Event) -> float:
        """What the device's arithmetic took, or stood still, between two marks that are both done."""

    def pinned(self, nbytes: int) -> Any:
        """Host memory that the device copies to and from, as a NumPy array of bytes. Not in the account."""

    def download(self, array: Array, host: Any, after: Sequence[Event] = ()) -> Event:
        """Start a copy of a contiguous array to pinned memory once the events are done. -> when it has arrived."""

    def upload(self, host: Any, array: Array, after: Sequence[Event] = ()) -> Event:
        """The same from pinned memory to a contiguous array."""
