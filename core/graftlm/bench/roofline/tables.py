"""A roofline report as tables on a terminal."""

from typing import Final

from rich.console import Console
from rich.table import Table

from graftlm.bench.roofline.report import CaseFigures, OperatorFigures, RooflineReport

__all__ = ["print_roofline"]

_NONE: Final = "-"


def print_roofline(report: RooflineReport, console: Console) -> None:
    """Print the ceilings, and a table for each step."""
    ceilings = report.ceilings
    console.print(f"{report.model} in {report.dtype}, attention {report.attention}; {report.machine}")
    if report.settings:
        console.print(f"with {', '.join(report.settings)}", markup=False)
    console.print(
        f"memory: {ceilings.read_bytes_per_s / 1e9:,.1f} GB/s read ({ceilings.read_by}, "
        f"{ceilings.read_bytes / 2**20:,.0f} MiB)"
    )
    shape = " x ".join(map(str, ceilings.matrix_shape))
    console.print(f"matrix: {ceilings.matrix_flops_per_s / 1e12:,.3f} TFLOP/s in {ceilings.dtype} ({shape})")
    for figures in report.cases:
        console.print()
        console.print(_table(figures))
        console.print(_sentence(figures))
    for line in report.left_out:
        console.print(f"\n{line}")


def _table(figures: CaseFigures) -> Table:
    table = Table(title=str(figures.case), title_justify="left", box=None, pad_edge=False)
    table.add_column("operator")
    for column in ("MB", "GFLOP", "ms", "of step", "bound by", "of ceiling"):
        table.add_column(column, justify="right")
    for row in figures.operators:
        table.add_row(*_cells(row))
    total_bytes = sum(row.num_bytes for row in figures.operators)
    sums = (_scaled(total_bytes, 1e6), _scaled(figures.flops, 1e9), f"{1e3 * figures.apart_s:,.3f}", "100.0 %")
    table.add_row("total", *sums)
    return table


def _cells(row: OperatorFigures) -> tuple[str, ...]:
    return (
        row.name,
        _scaled(row.num_bytes, 1e6),
        _scaled(row.flops, 1e9),
        f"{1e3 * row.time_s:,.3f}",
        f"{100 * row.share_of_step:.1f} %",
        row.bound or _NONE,
        _NONE if row.share_of_ceiling is None else f"{100 * row.share_of_ceiling:.0f} %",
    )


def _scaled(amount: int, unit: float) -> str:
    return f"{amount / unit:,.3f}" if amount else _NONE


def _sentence(figures: CaseFigures) -> str:
    return (
        f"step without timers: {1e3 * figures.step_s:,.3f} ms, median of {figures.num_steps}\n"
        f"{figures.case.kind} at {100 * figures.share_of_read:.0f} % of the measured read bandwidth, counting weights "
        f"and KV once; at {100 * figures.share_of_matrix:.0f} % of the measured matrix rate"
    )
