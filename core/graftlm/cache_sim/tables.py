"""The result of a study as a table on a terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graftlm.cache_sim.study import Outcome, TraceStudy

__all__ = ["print_study"]

#: Column titles of the figures; times are per request.
_COLUMNS = (
    "hit rate",
    "of optimum",
    "work saved",
    "evicted tokens",
    "bypassed",
    "match µs",
    "lock µs",
    "insert µs",
    "evict µs",
    "all µs",
)


def print_study(study: TraceStudy, console: Console) -> None:
    """Print the table of a study.

    For each capacity, the table has the offline optimum, then each pair of cache and strategy by descending hit rate.
    """
    trace = study.trace
    console.print(
        Text(
            f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens, footprint "
            f"{study.footprint_pages * study.page_size:,} tokens, pages of {study.page_size}",
            "bold",
        ),
        soft_wrap=True,
    )
    table = Table("capacity", "cache", "eviction", box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in _rows(study):
        table.add_row(*row)
    console.print(table)


def _rows(study: TraceStudy) -> Iterator[list[str]]:
    page_size = study.page_size
    for number, at in enumerate(study.capacities):
        if number:
            yield []
        best, evicted = at.optimum.hit_pages * page_size, at.optimum.evicted_pages * page_size
        size = f"{at.pages * page_size:,} ({_rate(at.pages, study.footprint_pages)})"
        yield [size, "", "offline optimum", _rate(best, study.trace.prompt_tokens), "", "", f"{evicted:,}"]
        for outcome in sorted(at.outcomes, key=lambda o: -o.replay.hit_tokens):
            yield ["", *_cells(outcome, best)]


def _cells(outcome: Outcome, best_hit_tokens: int) -> list[str]:
    replay = outcome.replay
    parts = [replay.match_ns, replay.lock_ns, replay.insert_ns, replay.evict_ns]
    times = [f"{ns / 1000 / replay.num_requests:.1f}" for ns in [*parts, sum(parts)]]
    return [
        str(outcome.cache),
        str(outcome.eviction),
        _rate(replay.hit_tokens, replay.prompt_tokens),
        _rate(replay.hit_tokens, best_hit_tokens),
        _rate(replay.hit_cost, replay.prompt_cost),
        f"{replay.evicted_tokens:,}",
        f"{replay.bypassed_requests:,}",
        *times,
    ]


def _rate(part: float, whole: float) -> str:
    return f"{part / whole:.2%}" if whole else "-"
