"""The plot of an ablation: the time of each workload without each part, relative to the full engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from graftlm.bench.ablation.report import FULL, AblationReport, Effect
from graftlm.plotting import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_ablation_plot"]

_INCHES_PER_WORKLOAD: Final = (4.0, 3.5)


def save_ablation_plot(report: AblationReport, path: Path) -> None:
    """Draw a diagram for each workload. Each switched-off part has a bar with its quartiles.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(one.workload for one in report.effects))
    width, height = _INCHES_PER_WORKLOAD
    figure = Figure(figsize=(width * len(workloads), height), layout="constrained")
    diagrams = figure.subplots(1, len(workloads), squeeze=False)[0]
    for workload, axes in zip(workloads, diagrams, strict=True):
        _draw([one for one in report.effects if one.workload == workload and one.switch != FULL], axes)
        axes.set_title(workload, fontsize=10)
    figure.suptitle(f"{report.model}: {report.machine}")
    save_figure(figure, path)


def _draw(effects: list[Effect], axes: "Axes") -> None:
    names = [one.switch for one in effects]
    below = [one.ratio - one.ratio_q1 for one in effects]
    above = [one.ratio_q3 - one.ratio for one in effects]
    axes.barh(names, [one.ratio for one in effects], xerr=[below, above], height=0.6)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("time without the part / time of the full engine")
