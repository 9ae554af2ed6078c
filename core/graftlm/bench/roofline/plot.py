"""The plot of a roofline report (Williams, Waterman, Patterson: doi.org/10.1145/1498765.1498785)."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from graftlm.bench.roofline.report import CaseFigures, RooflineReport
from graftlm.plotting import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_roofline_plot"]

_INCHES_PER_CASE: Final = (5.5, 4.5)
_COLUMNS: Final = 2

#: Range of the x axis, in operations per byte.
_INTENSITIES: Final = (0.05, 5000.0)

#: Area in points² of an operator's dot if the operator takes the whole step.
_DOT_AREA: Final = 900.0


def save_roofline_plot(report: RooflineReport, path: Path) -> None:
    """Draw a diagram for each step, with operators as dots below the roof. A dot's area shows the share of time.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    num_rows = -(-len(report.cases) // _COLUMNS)
    width, height = _INCHES_PER_CASE
    figure = Figure(figsize=(_COLUMNS * width, num_rows * height), layout="constrained")
    diagrams = figure.subplots(num_rows, _COLUMNS, squeeze=False).flatten()
    for figures, axes in zip(report.cases, diagrams, strict=False):  # the grid may have one unused diagram
        _draw(figures, report, axes)
    for axes in diagrams[len(report.cases) :]:
        axes.set_axis_off()
    figure.suptitle(f"{report.model}, {report.dtype}, attention {report.attention}: {report.machine}")
    save_figure(figure, path)


def _draw(figures: CaseFigures, report: RooflineReport, axes: "Axes") -> None:
    read, peak = report.ceilings.read_bytes_per_s, report.ceilings.matrix_flops_per_s
    low, high = _INTENSITIES
    roof = [low, peak / read, high]
    axes.plot(roof, [min(peak, read * x) for x in roof], color="black")
    axes.annotate(f"{read / 1e9:,.1f} GB/s", (low * 2, read * low * 2), rotation=35, va="bottom", fontsize=8)
    axes.annotate(f"{peak / 1e12:,.2f} TFLOP/s", (high, peak), ha="right", va="bottom", fontsize=8)
    for row in figures.operators:
        if row.num_bytes and row.flops and row.time_s > 0:
            at = (row.flops / row.num_bytes, row.flops / row.time_s)
            label = f"{row.name}, {100 * row.share_of_step:.0f} %"
            axes.scatter(*at, s=max(_DOT_AREA / 50, _DOT_AREA * row.share_of_step), alpha=0.6, label=label)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP/s")
    axes.set_title(f"{figures.case}: {1e3 * figures.step_s:,.2f} ms", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="lower right", title="share of the step", title_fontsize=7, markerscale=0.3)
