"""The result of an ablation as a table on a terminal."""

from typing import Final

from rich.console import Console
from rich.table import Table

from graftlm.bench.ablation.report import FULL, AblationReport

__all__ = ["print_ablation"]

#: Minimum number of rounds without a warning: quartiles of fewer rounds do not show the noise.
_FEW_ROUNDS: Final = 5


def print_ablation(report: AblationReport, console: Console) -> None:
    """Print one row for each pair of workload and switched-off part, then the parts that were not measured."""
    table = Table(title=f"{report.model}: {report.machine}", title_justify="left", box=None, pad_edge=False)
    table.add_column("workload")
    for column in ("wall s", "out tok/s", "time to full's", "quartiles"):
        table.add_column(column, justify="right")
    for one in report.effects:
        is_full = one.switch == FULL
        table.add_row(
            one.workload if is_full else f"  without {one.switch}",
            f"{one.wall_s:.3f}",
            f"{one.output_tokens_per_s:,.0f}",
            "" if is_full else f"{one.ratio:.2f}x",
            "" if is_full else f"{one.ratio_q1:.2f}-{one.ratio_q3:.2f}",
        )
    console.print(table)
    console.print(f"medians of {report.rounds} rounds; each ratio compares two runs of the same round")
    if report.rounds < _FEW_ROUNDS:
        console.print(
            f"too few rounds to distinguish a part's effect from noise: use at least {_FEW_ROUNDS} (--rounds)"
        )
    for skipped in report.not_applicable:
        where = "" if skipped.workload is None else f" to {skipped.workload}"
        console.print(f"{skipped.switch}: not applicable{where}: {skipped.reason}")
