"""The result of a study as a table, a JSON file and a plot."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graftlm.errors import ConfigError
from graftlm.plotting import save_figure
from graftlm.route_sim.figures import RouteFigures, study_as_json
from graftlm.route_sim.study import FleetStudy, TraceRouteStudy

__all__ = ["print_route_study", "save_route_plot", "save_route_studies"]

#: Version of the JSON format, increased when a field changes its meaning.
_FORMAT_VERSION: Final = 1

_COLUMNS: Final = (
    "hit rate",
    "of one cache",
    "busiest: tokens",
    "requests",
    "time",
    "TTFT s",
    "p50",
    "p99",
    "decision µs",
    "p50",
    "p99",
)


def print_route_study(study: TraceRouteStudy, console: Console) -> None:
    """Print the table of a study, with a part for each number of replicas."""
    trace = study.trace
    duration_s = trace.requests[-1].time_s - trace.requests[0].time_s
    console.print(
        Text(
            f"{trace.name}: {len(trace.requests):,} requests in {duration_s:,.0f} s, {trace.prompt_tokens:,} prompt "
            f"tokens, {study.capacity_pages * study.page_size:,} tokens per replica, pages of {study.page_size}",
            "bold",
        ),
        soft_wrap=True,
    )
    table = Table("replicas", "policy", box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for number, fleet in enumerate(study.fleets):
        if number:
            table.add_row()
        for row in _rows(fleet, trace.prompt_tokens):
            table.add_row(*row)
    console.print(table)


def _rows(fleet: FleetStudy, prompt_tokens: int) -> Iterator[list[str]]:
    yield [f"{fleet.num_replicas:,}", "one cache", f"{fleet.one_cache_hit_tokens / prompt_tokens:.2%}"]
    figures = [(str(outcome.policy), RouteFigures.of(outcome, fleet)) for outcome in fleet.outcomes]
    for name, one in sorted(figures, key=lambda pair: -pair[1].hit_rate):
        share = "-" if one.share_of_one_cache is None else f"{one.share_of_one_cache:.1%}"
        busiest = [one.busiest_tokens, one.busiest_requests, one.busiest_time]
        times = [f"{value:.3f}" for value in (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p99_s)]
        decisions = [f"{value:.1f}" for value in (one.decision_mean_us, one.decision_p50_us, one.decision_p99_us)]
        ratios = [f"{value:.3f}" for value in busiest]
        yield ["", name, f"{one.hit_rate:.2%}", share, *ratios, *times, *decisions]


def save_route_studies(studies: Sequence[TraceRouteStudy], path: Path) -> None:
    """Write the result on each trace to a JSON file.

    Raises:
        ConfigError: the file cannot be written.
    """
    document = {"format_version": _FORMAT_VERSION, "traces": [study_as_json(study) for study in studies]}
    try:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror or error}") from error


def save_route_plot(studies: Sequence[TraceRouteStudy], path: Path) -> None:
    """Save three diagrams for each trace: hit rate, load and TTFT over the number of replicas.

    Args:
        path: a PNG or SVG file.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.0, 4.5 * len(studies)), layout="constrained")
    for study, diagrams in zip(studies, figure.subplots(len(studies), 3, squeeze=False), strict=True):
        _draw(study, diagrams)
    save_figure(figure, path)


def _draw(study: TraceRouteStudy, diagrams: Any) -> None:
    replicas = [fleet.num_replicas for fleet in study.fleets]
    best = [100 * fleet.one_cache_hit_tokens / study.trace.prompt_tokens for fleet in study.fleets]
    style: dict[str, Any] = {"marker": "o", "markersize": 4}
    diagrams[0].plot(replicas, best, "--", color="black", label="one cache", **style)
    for place, outcome in enumerate(study.fleets[0].outcomes):
        figures = [RouteFigures.of(fleet.outcomes[place], fleet) for fleet in study.fleets]
        name = str(outcome.policy)
        diagrams[0].plot(replicas, [100 * one.hit_rate for one in figures], label=name, **style)
        diagrams[1].plot(replicas, [one.busiest_tokens for one in figures], label=name, **style)
        diagrams[2].plot(replicas, [one.ttft_p99_s for one in figures], label=name, **style)
    labels = ("hit rate, % of prompt tokens", "busiest replica, tokens over mean", "99th percentile of TTFT, s")
    for axes, label in zip(diagrams, labels, strict=True):
        axes.set(title=study.trace.name, xlabel="replicas", ylabel=label, xscale="log")
        axes.set_xticks(replicas, [f"{number:,}" for number in replicas])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    diagrams[0].legend()
