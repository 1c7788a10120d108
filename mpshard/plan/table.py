"""Plans as a table, one column for each number of ranks."""

from __future__ import annotations

from typing import Any

from rich.table import Table

WORDS = {"parameter": "parameters", "gradient": "gradients", "moment": "moments", "gathered": "gathered units",
         "full_gradient": "full gradients"}


def plan_table(found: dict[str, Any]) -> Table:
    """What `mpshard.plan.plans` returns."""
    caption = ["bytes of one rank; messages and staging on top"]
    if "device_bytes" in found:
        fewest = found["fewest_ranks"]
        caption.append(f"with {mib(found['device_bytes'])} a rank and one micro-batch each the fewest ranks are {fewest}" if fewest else
                       "no number of ranks is enough: the activations, or the largest units, are too large")
    caption += [f"{row['ranks']} ranks: {row['problem']}" for row in found["plans"] if "problem" in row]
    title = f"{found['arch']}, {found['parameters']:,} parameters, shard.strategy={found['strategy']}"
    table = Table(title=title, caption="\n".join(caption))
    rows = [row for row in found["plans"] if "problem" not in row]
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}", justify="right")
    for kind, word in WORDS.items():
        table.add_row(word, *(mib(row["bytes"][kind]) for row in rows))
    table.add_row("activations, estimated", *(mib(row["activation_bytes_estimated"]) for row in rows))
    table.add_row("in all", *(mib(row["total_bytes"] + row["activation_bytes_estimated"]) for row in rows), end_section=True)
    if "device_bytes" in found:
        table.add_row("fits", *("yes" if row["fits"] else "[red]no[/]" for row in rows), end_section=True)
    table.add_row("micro-batches a step", *(f"{row['micro_batches']:,}" for row in rows))
    table.add_row("gathers, reduces a step", *(f"{row['gathers']:,}, {row['reduces']:,}" for row in rows))
    table.add_row("gathered a step", *(mib(row["bytes_gathered"]) for row in rows))
    table.add_row("reduced a step", *(mib(row["bytes_reduced"]) for row in rows))
    table.add_row("transport", *(row["transport"] for row in rows))
    return table


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
