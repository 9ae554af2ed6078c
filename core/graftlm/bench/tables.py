"""A report as tables on a terminal, alone or compared with another report."""

from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graftlm.bench.report import Report
from graftlm.bench.summary import Distribution, Summary

__all__ = ["print_report"]

_NONE: Final = "-"

_Figure = tuple[str, Callable[[Summary], float | None], str]

#: (name of the figure, function that returns the value, format)
_FIGURES: Final[tuple[_Figure, ...]] = (
    ("requests completed", lambda s: s.completed, ",d"),
    ("requests failed", lambda s: s.failed, ",d"),
    ("duration, s", lambda s: s.duration_s, ",.2f"),
    ("requested rate, requests/s", lambda s: s.asked_rate, ",.2f"),
    ("sent, requests/s", lambda s: s.sent_rate, ",.2f"),
    ("completed, requests/s", lambda s: s.completed_rate, ",.2f"),
    ("in flight, mean", lambda s: s.mean_in_flight, ",.1f"),
    ("in flight, max", lambda s: s.max_in_flight, ",d"),
    ("prompt tokens", lambda s: s.prompt_tokens, ",d"),
    ("cached prompt tokens", lambda s: s.cached_tokens, ",d"),
    ("output tokens", lambda s: s.output_tokens, ",d"),
    ("prompt tokens/s", lambda s: s.prompt_tokens_per_s, ",.1f"),
    ("output tokens/s", lambda s: s.output_tokens_per_s, ",.1f"),
    ("tokens per chunk", lambda s: s.tokens_per_chunk, ".2f"),
    ("client's share of a core", lambda s: s.client_cpu_share, ".0%"),
)

_LATENCIES: Final[tuple[tuple[str, Callable[[Summary], Distribution | None]], ...]] = (
    ("time to first token", lambda s: s.ttft_s),
    ("time per later token", lambda s: s.tpot_s),
    ("gap between chunks", lambda s: s.gap_s),
    ("end to end", lambda s: s.e2e_s),
    ("end to end, from arrival", lambda s: s.e2e_from_arrival_s),
    ("wait in the client", lambda s: s.client_queue_s),
    ("lag of the client's event loop", lambda s: s.loop_lag_s),
)


def print_report(report: Report, console: Console, other: Report | None = None) -> None:
    """Print figures, failures and warnings.

    Args:
        other: report to compare with; its values and the ratios are printed too.
    """
    model = report.server.model or "a model"
    about = [f"{model} at {report.server.url}", report.settings.api, _LOADS[report.summary.mode]]
    console.print(Text(", ".join([*([report.label] if report.label else []), *about]), "bold"), soft_wrap=True)
    console.print(_figures(report, other))
    console.print()
    console.print(_latencies(report, other))
    for failure in report.summary.failures:
        console.print(Text(f"failed: {failure.count} x {failure.kind}: {failure.example}", "red"), soft_wrap=True)
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", "yellow"), soft_wrap=True)


_LOADS: Final = {
    "burst": "all requests at once",
    "closed": "closed loop",
    "open": "open loop",
    "bounded": "open loop, bounded",
}


def _figures(report: Report, other: Report | None) -> Table:
    table = Table(box=None, pad_edge=False, show_header=other is not None)
    table.add_column("")
    table.add_column("this run", justify="right")
    if other is not None:
        table.add_column(other.label or "other", justify="right")
        table.add_column("ratio", justify="right")
    for name, value_of, form in _FIGURES:
        mine, theirs = value_of(report.summary), None if other is None else value_of(other.summary)
        if mine is None and theirs is None:
            continue
        comparison = [] if other is None else [_form(theirs, form), _ratio(mine, theirs)]
        table.add_row(name, _form(mine, form), *comparison)
    return table


def _latencies(report: Report, other: Report | None) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms" if other is None else f"ms (ratio to {other.label or 'other'})")
    percentiles = [f"{p:g}" for p in report.settings.percentiles]
    for column in ("mean", *(f"p{p}" for p in percentiles), "max"):
        table.add_column(column, justify="right")
    for name, spread_of in _LATENCIES:
        mine = spread_of(report.summary)
        theirs = None if other is None else spread_of(other.summary)
        if mine is not None:
            cells = zip(_values(mine, percentiles), _values(theirs, percentiles), strict=True)
            table.add_row(name, *(_cell(value, before, other is not None) for value, before in cells))
    return table


def _values(spread: Distribution | None, percentiles: list[str]) -> Iterator[float | None]:
    """Yield the mean, the percentiles and the maximum; None for each missing value."""
    yield None if spread is None else spread.mean
    for p in percentiles:
        yield None if spread is None else spread.percentiles.get(p)
    yield None if spread is None else spread.max


def _cell(value: float | None, before: float | None, compares: bool) -> str:
    text = _NONE if value is None else f"{1e3 * value:,.2f}"
    return f"{text} ({_ratio(value, before)})" if compares else text


def _form(value: float | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _ratio(mine: float | None, theirs: float | None) -> str:
    return _NONE if mine is None or not theirs else f"{mine / theirs:.2f}x"
