"""The figures of runs as a table on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from graftlm.bench.offline.runs import Run

__all__ = ["print_runs"]


def print_runs(runs: Sequence[Run], title: str, console: Console) -> None:
    """Print a line for each run.

    A workload's first variant comes first; the lines of its other variants have the ratio of the times.
    """
    table = Table(title=title, caption="ms: median (99th percentile)")
    table.add_column("workload")
    for column in ("wall s", "out tok/s", "total tok/s", "first token ms", "ms/token", "cached"):
        table.add_column(column, justify="right")
    for column in ("steps", "host ms/step", "model ms/step", "retracted"):
        table.add_column(column, justify="right")
    first: dict[str, Run] = {}
    for run in runs:
        base = first.setdefault(run.workload, run)
        name = run.workload if run is base else f"  {run.variant}: {run.wall_s / base.wall_s:.2f}x the time"
        table.add_row(
            name,
            f"{run.wall_s:.2f}",
            f"{run.output_tokens_per_s:,.0f}",
            f"{run.total_tokens_per_s:,.0f}",
            f"{run.ttft_p50_ms:,.0f} ({run.ttft_p99_ms:,.0f})",
            f"{run.tpot_p50_ms:.2f} ({run.tpot_p99_ms:.2f})",
            f"{run.cache_hit_rate:.0%}",
            str(run.steps),
            f"{run.host_ms_per_step:.2f}",
            f"{run.model_ms_per_step:.2f}",
            str(run.retractions),
        )
    console.print(table)
