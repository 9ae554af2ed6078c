"""Plots hit rate against capacity."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from graftlm.cache_sim.study import TraceStudy
from graftlm.plotting import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save_plot"]

_INCHES_PER_TRACE: Final = (7.0, 4.5)


def save_plot(studies: Sequence[TraceStudy], path: Path) -> None:
    """Save one diagram for each trace, side by side.

    A diagram has a line for each pair of cache and strategy, and a dashed line for the offline optimum.

    Args:
        path: a PNG or SVG file.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    width, height = _INCHES_PER_TRACE
    figure = Figure(figsize=(width * len(studies), height), layout="constrained")
    diagrams = figure.subplots(1, len(studies), squeeze=False)[0]
    for study, axes in zip(studies, diagrams, strict=True):
        _draw(study, axes)
    save_figure(figure, path)


def _draw(study: TraceStudy, axes: "Axes") -> None:
    def percent(hit_tokens: int) -> float:
        return 100 * hit_tokens / study.trace.prompt_tokens

    capacities = [at.pages * study.page_size for at in study.capacities]
    optimum = [percent(at.optimum.hit_pages * study.page_size) for at in study.capacities]
    by_plugins = zip(*(at.outcomes for at in study.capacities), strict=True)  # per plugin pair: all capacities
    style: dict[str, Any] = {"marker": "o", "markersize": 4}
    axes.plot(capacities, optimum, "--", color="black", label="offline optimum", **style)
    for outcomes in sorted(by_plugins, key=lambda outcomes: -outcomes[-1].replay.hit_tokens):
        label = f"{outcomes[0].cache}, {outcomes[0].eviction}"
        axes.plot(capacities, [percent(outcome.replay.hit_tokens) for outcome in outcomes], label=label, **style)
    axes.set(title=study.trace.name, xlabel="capacity", ylabel="hit rate, % of prompt tokens", xscale="log")
    axes.set_xticks(capacities, [at.asked for at in study.capacities])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
