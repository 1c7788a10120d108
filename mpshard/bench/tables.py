"""The benchmarks' results as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def step_table(found: dict[str, Any]) -> Table:
    """What `mpshard.bench.step.measure` returns."""
    table = Table(title=f"{found['arch']}, {found['parameters']:,} parameters, {found['world_size']} ranks", show_header=False)
    parts = " + ".join(f"{found[name] * 1e3:,.1f}" for name in ("forward_s", "backward_s", "optim_s"))
    rows = [("tokens/s, all ranks", f"{found['tokens_per_s']:,.0f}"),
            ("a step", f"{found['step_s'] * 1e3:,.1f} ms, median of {found['steps']}"),
            ("  forward, backward, optimizer", f"{parts} ms"),
            ("  waits for gathers, reduces", f"{found['gather_wait_s'] * 1e3:,.2f} + {found['reduce_wait_s'] * 1e3:,.2f} ms, "
                                             f"{found['wait_share']:.1%} of the step"),
            ("rate of a rank", f"{found['gflops']:,.1f} GFLOP/s")]
    if "gemm_share" in found:
        rows.append(("  of its matrix products alone", f"{found['gemm_gflops']:,.1f} GFLOP/s; share {found['gemm_share']:.1%}"))
    if "overhead_share" in found:
        nothing, whole = (f"{found[name] * 1e3:,.2f}" for name in ("overhead_cpu_s", "cpu_s"))
        share = f"{found['overhead_share']:.1%}"
        rows.append(("the same instructions on almost nothing", f"{nothing} of {whole} ms of CPU time; share {share}"))
    rows += [("communication hidden", f"{found['hidden_fraction']:.1%}"),
             ("bytes gathered, reduced a rank", f"{found['bytes_gathered']:,}, {found['bytes_reduced']:,}"),
             ("peak resident memory, largest rank", mib(found["peak_rss_bytes"])),
             ("  of it counted on the device", mib(found["peak_bytes"])),
             ("page faults a step", f"{found['page_faults_per_step']:,.0f}"),
             ("transport, progress", f"{found['transport']}, {found['progress']}"),
             ("BLAS threads a rank", str(found["blas_threads"]))]
    for name, value in rows:
        table.add_row(name, value)
    return table


def gemm_table(found: dict[str, Any]) -> Table:
    """What `mpshard.bench.gemm.measure` returns."""
    table = Table(title=f"matrix products, {found['world_size']} ranks at once, GFLOP/s of rank 0",
                  caption=f"all, each as often as it occurs, mean of the ranks: {found['gflops']:,.1f} GFLOP/s")
    for name in ("rows", "inner", "columns", "times", "y = x w", "dx = dy w'", "dw = x' dy"):
        table.add_column(name, justify="right")
    for row in found["products"]:
        table.add_row(*(f"{row[k]:,}" for k in ("rows", "inner", "columns", "count")),
                      *(f"{row[k]:,.1f}" for k in ("forward", "dx", "dw")))
    return table


def collectives_table(found: dict[str, Any]) -> Table:
    """What `mpshard.bench.transports.measure` returns."""
    caption = f"progress by {found['progress']}"
    if found["no_shm"]:
        caption += f"; no shared memory: {found['no_shm']}"
    table = Table(title=f"moving a unit between {found['world_size']} ranks", caption=caption)
    for name in ("transport", "collective", "unit", "time", "GB/s", "hidden"):
        table.add_column(name, justify="left" if name in ("transport", "collective") else "right")
    for row in found["rows"]:
        table.add_row(row["transport"], row["collective"], mib(row["bytes"]), f"{row['seconds'] * 1e3:,.3f} ms",
                      f"{row['gb_per_s']:,.2f}", f"{row['hidden_fraction']:.0%}")
    return table


def mib(nbytes: float) -> str:
    """Bytes as people read them."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
