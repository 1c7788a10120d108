"""Everything about GPUs that wants a GPU, in one run of about 8 minutes: python examples/gpu_check.py [--out DIR]

Prints a table, writes DIR/gpu_check.json and DIR/trace.json (for ui.perfetto.dev). Each part runs in a process of its own,
so that one that fails costs no other; `--parts kernels,rates` runs some of them. Needs CuPy; two ranks need an mpiexec,
the comparison needs PyTorch, and what is missing is said and left out. Exit status 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import mpshard as mps
from mpshard.device import Kind, open_device

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Sizes:
    """What the parts work on. `SMALL` is for trying the script out where kernels are slow."""

    small_model: mps.LlamaConfig = mps.LlamaConfig(vocab_size=512, max_seq_len=128, n_layers=4, d_model=256, n_heads=8, n_kv_heads=2)
    steps: int = 20
    large_model: mps.LlamaConfig = mps.LlamaConfig(vocab_size=32000, max_seq_len=2048, n_layers=16, d_model=2048, n_heads=32,
                                                   n_kv_heads=8, d_ff=8192)
    large_batch: int = 4
    large_steps: int = 8
    repeats: int = 20
    product: int = 8192


SMALL = Sizes(mps.LlamaConfig(vocab_size=60, max_seq_len=16, n_layers=1, d_model=16, n_heads=2, n_kv_heads=1), 2,
              mps.LlamaConfig(vocab_size=60, max_seq_len=32, n_layers=1, d_model=32, n_heads=2, n_kv_heads=1), 1, 2, 1, 64)


# -- parts -----------------------------------------------------------------------------------
def machine(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Which GPU, and whether MPI takes its memory."""
    from mpshard.comm.cuda_probe import probe

    device = open_device("cupy")
    found = {"device": device.about, "cuda_aware": str(probe())}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return found


def kernels(sizes: Sizes, out: Path) -> dict[str, Any]:
    """The tests of every kernel in every precision against float64."""
    files = [str(ROOT / "tests/device" / name) for name in ("test_cupy_kernels.py", "test_cupy_fp8.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (out / "kernels.log").write_text(done.stdout + done.stderr)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)}
    if done.returncode or not counts.get("passed"):
        raise AssertionError(f"{counts or done.stderr[-300:]}: see {out / 'kernels.log'}")
    return counts


def rate(device: Any, repeats: int, action: Callable[[], Any]) -> float:
    """How often a second `action` can be done, after a first time."""
    action()
    device.synchronise()
    start = time.perf_counter()
    for _ in range(repeats):
        action()
    device.synchronise()
    return repeats / (time.perf_counter() - start)


def rates(sizes: Sizes, out: Path) -> dict[str, Any]:
    """TFLOP/s of products and attention, GB/s of what is bound by memory; bf16 unless it says otherwise."""
    from mpshard.shard.precision import DTYPES

    device, random, found = open_device("cupy"), np.random.default_rng(0), {}
    bf16 = DTYPES["bf16"]

    def make(*shape: int, dtype: Any = bf16) -> Any:
        return device.from_host(random.standard_normal(shape, np.float32).astype(dtype))

    def measure(name: str, unit: str, amount: float, action: Callable[[], Any], scale: float) -> None:
        found[f"{name}_{unit}"] = round(rate(device, sizes.repeats, action) * amount / scale, 1)

    n, c = sizes.product, sizes.large_model
    a, b, product = make(n, n), make(n, n), device.empty((n, n), bf16)
    measure("matmul_bf16", "tflops", 2 * n**3, lambda: device.matmul(a, b, out=product), 1e12)
    wide_a, wide_b, wide = make(n, n, dtype=np.float32), make(n, n, dtype=np.float32), device.empty((n, n), np.float32)
    measure("matmul_fp32", "tflops", 2 * n**3, lambda: device.matmul(wide_a, wide_b, out=wide), 1e12)
    device.tf32 = True
    measure("matmul_tf32", "tflops", 2 * n**3, lambda: device.matmul(wide_a, wide_b, out=wide), 1e12)

    s, t, d, h, k, e = sizes.large_batch, c.max_seq_len, c.d_model, c.n_heads, c.kv_heads, c.head_width
    qkv, dy = make(s, t, (h + 2 * k) * e), make(s, t, h * e)
    y, lse = device.attention(qkv, h, k, e**-0.5)
    causal = 2 * s * h * t * t * e  # both products, lower triangle
    measure("attention", "tflops", causal, lambda: device.attention(qkv, h, k, e**-0.5), 1e12)
    measure("attention_backward", "tflops", 2.5 * causal, lambda: device.attention_backward(dy, qkv, y, lse, h, k, e**-0.5), 1e12)
    x, weight = make(s * t, d), make(d)
    measure("rms_norm", "gb_s", 4 * x.size, lambda: device.rms_norm(x, weight, 1e-5), 1e9)
    _, stats = device.rms_norm(x, weight, 1e-5)
    dweight = device.empty(d, bf16)
    measure("rms_norm_backward", "gb_s", 6 * x.size,
            lambda: device.rms_norm_backward(x, x, weight, stats, dweight, False, None), 1e9)
    gate_up = make(s * t, 2 * c.ff)
    measure("swiglu", "gb_s", 3 * gate_up.size, lambda: device.swiglu(gate_up), 1e9)
    w, g, m, v = (device.zeros(n * n, np.float32) for _ in range(4))
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 1, "gradient_scale": 1.0}
    measure("adamw", "gb_s", 28 * w.size, lambda: device.adamw(w, g, m, v, **settings), 1e9)
    table, dtable = make(c.vocab_size, d), device.empty((c.vocab_size, d), np.float32)
    targets = device.from_host(random.integers(0, c.vocab_size, s * t))
    measure("cross_entropy", "tflops", 6 * s * t * d * c.vocab_size,
            lambda: device.cross_entropy(x, table, targets, -100, 1.0, dtable, False, True), 1e12)
    return found


def libraries(sizes: Sizes, out: Path) -> dict[str, Any]:
    """NVIDIA's libraries where they are installed: whether they compute what the own kernels do, and how many times as fast.

    Products of 8 bits, in all three ways that a linear layer has them: beside the own path, and beside products of bf16. Those with
    a GELU or a bias gradient: see `epilogues`.
    """
    from mpshard.device import gpu_libraries
    from mpshard.shard.precision import DTYPES

    device, random, c = open_device("cupy"), np.random.default_rng(0), sizes.large_model
    s, t, d, h, k, e = sizes.large_batch, c.max_seq_len, c.d_model, c.n_heads, c.kv_heads, c.head_width
    qkv, dy, x, w, bias = (device.from_host(random.standard_normal(shape, np.float32).astype(DTYPES["bf16"]))
                           for shape in ((s, t, (h + 2 * k) * e), (s, t, h * e), (s * t, d), (d, d), (d,)))

    def measure() -> tuple[float, ...]:
        y, lse = device.attention(qkv, h, k, e**-0.5)
        return tuple(rate(device, sizes.repeats, action) for action in (
            lambda: device.attention(qkv, h, k, e**-0.5), lambda: device.attention_backward(dy, qkv, y, lse, h, k, e**-0.5),
            lambda: device.matmul(x, w, bias=bias)))

    n = sizes.product
    a, b = (device.from_host(random.standard_normal((n, n), np.float32).astype(DTYPES["bf16"])) for _ in range(2))
    layer = {"forward": (a, b.T, (False, False)), "inputs": (a, b, (True, False)), "weights": (a.T, b, (True, False))}
    exact = {name: device.to_host(device.matmul_fp8(*args)).astype(np.float32) for name, args in layer.items()}

    own, left_out = measure(), gpu_libraries(device, list)
    names = ("attention", "attention_backward", "product_with_bias")
    found = {"device": device.about, "left_out": "; ".join(left_out) or "nothing", "fp8_products": device.fp8_products,
             **{f"{name}_times_as_fast": round(b / a, 2) for name, a, b in zip(names, own, measure(), strict=True)}}
    for name, (left, right, gradients) in layer.items():
        values = device.to_host(device.matmul_fp8(left, right, gradients)).astype(np.float32)
        difference = float(np.abs(values - exact[name]).max() / np.abs(exact[name]).max())
        if not difference <= 2e-2:
            raise AssertionError(f"products of 8 bits, {name}: {difference:.2e} of the largest value apart from the own path")
        fp8, bf16 = (rate(device, sizes.repeats, action) for action in (
            partial(device.matmul_fp8, left, right, gradients), partial(device.matmul, left, right)))
        found |= {f"fp8_{name}_difference": difference, f"fp8_{name}_tflops": round(fp8 * 2 * n**3 / 1e12, 1),
                  f"fp8_{name}_times_bf16": round(fp8 / bf16, 2)}
    x8, w8 = device.to_fp8(a, False), device.to_fp8(b, False)  # what is left if rounding cost nothing
    out = device.empty((n, n), DTYPES["bf16"])
    if device.fp8_library is not None and (product := device.fp8_library.product((n, n, n), (False, False), out, False, None)):
        alone = rate(device, sizes.repeats, lambda: device.fp8_library.run(product, x8, w8, None, out))
        found["fp8_product_alone_tflops"] = round(alone * 2 * n**3 / 1e12, 1)
    return found | (epilogues(device, sizes) if device.epilogues is not None else {})


def epilogues(device: Any, sizes: Sizes) -> dict[str, Any]:
    """Products with GELU, with its derivative, and with a bias gradient: their values beside float64's, in units of rounding of the
    largest value and in every precision, and how many times as fast they are as a product and a kernel, in bf16."""
    from mpshard.device.numpy_device import NumpyDevice
    from mpshard.shard.precision import DTYPES

    exact, fused, random, found = NumpyDevice(), device.epilogues, np.random.default_rng(0), {}

    def make(dtype: Any, *shape: int) -> tuple[Any, np.ndarray]:
        host = random.standard_normal(shape, np.float32).astype(dtype)
        return device.from_host(host), host.astype(np.float64)

    n, i, o = 192, 64, 256
    for name in ("bf16", "fp16", "fp32"):
        dtype, pairs = DTYPES[name], []
        (x, x64), (w, w64), (bias, bias64) = (make(dtype, *shape) for shape in ((n, i), (o, i), (o,)))
        (back, back64), (v, v64), (dy, dy64) = (make(dtype, *shape) for shape in ((n, i), (i, o), (n, o)))
        if name != "fp32":  # left to kernels
            (y, h), (alone, _), h64 = fused.gelu(x, w.T, bias, True), fused.gelu(x, w.T, bias, False), x64 @ w64.T + bias64
            pairs += [("gelu", y, exact.gelu(h64, True)), ("gelu", alone, exact.gelu(h64, True)), ("gelu", h, h64)]
            h64 = device.to_host(h).astype(np.float64)
            pairs += [("gelu_backward", fused.gelu_backward(back, v, h), exact.gelu_backward(back64 @ v64, h64, True))]
        for transposed, product in ((False, dy64.T @ x64), (True, x64.T @ dy64)):
            weight, sums = device.empty(product.shape, dtype), device.empty(o, dtype)
            if not fused.linear_gradients(dy, x, weight, sums, transposed):
                raise AssertionError(f"cuBLASLt has no bias gradients of {name}")
            pairs += [("gradients", weight, product), ("gradients", sums, dy64.sum(0))]
        for what, ours, theirs in pairs:
            difference = np.abs(device.to_host(ours).astype(np.float64) - theirs).max() / np.abs(theirs).max()
            units = float(difference / ml_dtypes.finfo(dtype).eps)
            if not units <= (64 if name == "fp32" else 8):
                raise AssertionError(f"{what} in {name}: {units:.1f} units of rounding of the largest value apart from float64")
            found[f"{name}_{what}_units"] = max(found.get(f"{name}_{what}_units", 0.0), round(units, 2))

    c, bf16, wide = sizes.large_model, DTYPES["bf16"], np.dtype(np.float32)
    n, i, o = sizes.large_batch * c.max_seq_len, c.d_model, 4 * c.d_model
    (x, _), (w, _), (bias, _), (dy, _), (back, _) = (make(bf16, *shape) for shape in ((n, i), (i, o), (o,), (n, o), (n, i)))
    h = device.matmul(x, w, bias=bias)

    def gradients(weight: Any, sums: Any) -> None:
        device.matmul(x.T, dy, out=weight)
        device.column_sum(dy, sums, False)

    short, long = ((device.empty((i, o), dtype), device.empty(o, dtype)) for dtype in (bf16, wide))
    for what, by_library, by_kernels in (
            ("gelu", lambda: fused.gelu(x, w, bias, True), lambda: device.gelu(device.matmul(x, w, bias=bias), True)),
            ("gelu_backward", lambda: fused.gelu_backward(back, w, h), lambda: device.gelu_backward(device.matmul(back, w), h, True)),
            ("gradients", lambda: fused.linear_gradients(dy, x, *short, True), lambda: gradients(*short)),
            ("gradients_fp32", lambda: fused.linear_gradients(dy, x, *long, True), lambda: gradients(*long))):
        times = rate(device, sizes.repeats, by_library) / rate(device, sizes.repeats, by_kernels)
        done = by_library()
        found[f"product_with_{what}_times_as_fast"] = "not by cuBLASLt" if done is None or done is False else round(times, 2)
    return found


def losses(config: mps.LlamaConfig, steps: int, device: str, precision: Any = None, transport: str = "auto") -> list[float]:
    """Train on random tokens, 4 sequences a step over all ranks; the losses."""
    sharded = mps.shard(mps.models.llama(config), device=device, precision=precision, transport=transport)
    optim = mps.AdamW(sharded, lr=1e-3)
    if sharded.loss_scale is not None:
        sharded.loss_scale.value = 64.0  # so that no step is lost to finding it
    rank, world, found = sharded.mesh.rank, sharded.mesh.world, []
    for step in range(steps):
        tokens = np.random.default_rng(step).integers(0, config.vocab_size, (1, 4, config.max_seq_len + 1))
        tokens[..., 1::2] = tokens[..., :-1:2]  # every second token repeats the one before: something to learn
        mine = tokens[:, rank * 4 // world:(rank + 1) * 4 // world]
        output = sharded.step((mine[..., :-1], mine[..., 1:]))
        optim.step(output)
        found.append(output.loss)
    sharded.close()
    return found


def apart(ours: list[float], theirs: list[float], tolerance: float) -> float:
    """Largest relative difference of two runs' losses; an error if it is over `tolerance`."""
    difference = float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))
    if not difference <= tolerance:
        raise AssertionError(f"losses differ by {difference:.2e} (allowed: {tolerance:.0e}): {ours} and {theirs}")
    return difference


def numpy_and_cupy(sizes: Sizes, out: Path) -> dict[str, Any]:
    """The same training steps on the CPU and on the GPU, fp32."""
    ours, theirs = (losses(sizes.small_model, sizes.steps, device) for device in ("cupy", "numpy"))
    return {"steps": sizes.steps, "difference": apart(ours, theirs, 1e-4), "last_loss": ours[-1]}


def precisions(sizes: Sizes, out: Path) -> dict[str, Any]:
    """bf16, fp16, and bf16 with products of fp8, against fp32 on the GPU."""
    from mpshard.shard.precision import Precision

    exact = losses(sizes.small_model, sizes.steps, "cupy")
    tolerances = {"bf16": 2e-2, "fp16": 5e-3}
    found = {name: apart(losses(sizes.small_model, sizes.steps, "cupy", precision=Precision(name)), exact, tolerance)
             for name, tolerance in tolerances.items()}
    fp8 = losses(sizes.small_model, sizes.steps, "cupy", precision=Precision("bf16", products="fp8"))
    return found | {"bf16_fp8": apart(fp8, exact, 1e-1)}


def two_ranks(sizes: Sizes, out: Path) -> dict[str, Any]:
    """Two ranks that share the GPU, staged, against one."""
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        return {"skipped": "no mpiexec"}
    command = [launcher, "-n", "2", sys.executable, "-m", "mpi4py", __file__, "--part", "of_two", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    theirs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))["losses"]
    return {"steps": sizes.steps, "difference": apart(theirs, losses(sizes.small_model, sizes.steps, "cupy"), 1e-4)}


def of_two(sizes: Sizes, out: Path) -> dict[str, Any]:
    """What each of two ranks does."""
    return {"losses": losses(sizes.small_model, sizes.steps, "cupy", transport="staged")}


def llama(sizes: Sizes, out: Path) -> dict[str, Any]:
    """A Llama of about 1 B parameters in bf16: speed, share of the matrix rate, memory, a trace."""
    from mpshard.bench.work import step_flops
    from mpshard.shard.precision import Precision
    from mpshard.tracing import Tracing

    config, batch = sizes.large_model, sizes.large_batch
    model = mps.models.llama(config)
    sharded = mps.shard(model, device="cupy", precision=Precision("bf16"), recompute="none")
    optim, times, found = mps.AdamW(sharded, lr=1e-4), [], []
    tracing = None
    for step in range(sizes.large_steps):
        if step == sizes.large_steps - 2:
            tracing = Tracing(sharded, out / "trace.json", 2)
        tokens = np.random.default_rng(step).integers(0, config.vocab_size, (1, batch, config.max_seq_len + 1))
        start = time.perf_counter()
        output = sharded.step((tokens[..., :-1], tokens[..., 1:]))
        updating = time.perf_counter()
        optim.step(output)
        sharded.device.synchronise()
        times.append(time.perf_counter() - start)
        found.append(output.loss)
        if tracing is not None:
            tracing.done(step + 1, start, updating, start + times[-1])
    tokens_a_step, step_s = batch * config.max_seq_len, float(np.median(times[2:] or times))
    flops = step_flops(model, tokens_a_step, config.max_seq_len)
    memory = {kind.value: sharded.device.memory.peak(kind) for kind in Kind}
    sharded.close()
    return {"device": sharded.device.about, "parameters": model.size, "step_s": round(step_s, 4),
            "tokens_per_s": round(tokens_a_step / step_s),
            "tflops": round(flops / step_s / 1e12, 1), "peak_bytes": sharded.device.memory.peak(), "peak_by_kind": memory,
            "losses": [round(loss, 4) for loss in found]}


def pytorch(sizes: Sizes, out: Path) -> dict[str, Any]:
    """The same model by PyTorch's FSDP2 on the same GPU."""
    c = sizes.large_model
    shape = {"layers": c.n_layers, "d-model": c.d_model, "heads": c.n_heads, "kv-heads": c.kv_heads, "ff": c.ff, "vocab": c.vocab_size,
             "seq": c.max_seq_len, "batch": sizes.large_batch, "steps": sizes.large_steps}
    command = [sys.executable, str(HERE / "peers/fsdp2_gpu.py"), *(f"--{name}={value}" for name, value in shape.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode == 3:
        return {"skipped": done.stderr.strip()}
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


PARTS = {part.__name__: part for part in (machine, kernels, rates, libraries, numpy_and_cupy, precisions, two_ranks, llama, pytorch)}
LIMIT = 240  # seconds a part


# -- the run ---------------------------------------------------------------------------------
def run(name: str, out: Path) -> dict[str, Any]:
    """A part in a process of its own: its result, or {"failed": why}."""
    start = time.perf_counter()
    try:
        command = [sys.executable, __file__, "--part", name, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            (out / f"{name}.log").write_text(done.stdout + done.stderr)
            found = {"failed": lines[-1][:400]}
        else:
            found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        found = {"failed": f"not done after {LIMIT} s"}
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def conclusions(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What follows from several parts together."""
    ours, theirs, rate = (results.get(name, {}) for name in ("llama", "pytorch", "rates"))
    found = {}
    if "tflops" in ours and "matmul_bf16_tflops" in rate:
        found["share_of_the_matrix_rate"] = round(ours["tflops"] / rate["matmul_bf16_tflops"], 3)
    if "tokens_per_s" in ours and "tokens_per_s" in theirs:
        found["speed_over_pytorch"] = round(ours["tokens_per_s"] / theirs["tokens_per_s"], 3)
        found["memory_over_pytorch"] = round(ours["peak_bytes"] / theirs["peak_bytes"], 3)
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("part", "result", title="mpshard on a GPU")
    for name, found in results.items():
        lines = [f"{key}: {value:.2e}" if isinstance(value, float) and abs(value) < 0.01 else f"{key}: {value}"
                 for key, value in found.items() if not isinstance(value, list)]
        table.add_row(f"[red]{name}" if "failed" in found else name, "\n".join(lines))
    Console(width=140).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where results go (default: a new temporary folder)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in this process, result on the last line
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-check-"))
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        found = {**PARTS, "of_two": of_two}[arguments.part](Sizes(), out)
        print(json.dumps(found))
        return 0
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.parts.split(","):
        print(f"{name} ...", flush=True)
        results[name] = run(name, out)
        results["together"] = conclusions(results)
        (out / "gpu_check.json").write_text(json.dumps(results, indent=1) + "\n")  # at once: a time limit may end us
    show(results)
    print(f"written to {out}")
    return int(any("failed" in found for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
