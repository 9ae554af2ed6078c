"""`graftlm cache-sim`, which compares prefix caches and eviction strategies on recorded requests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftlm.cli.options import ConfigOption, SetOption, load_config

if TYPE_CHECKING:
    from rich.console import Console

    from graftlm.cache_sim import Choice, Study, Trace, TraceStudy
    from graftlm.config import EngineConfig
    from graftlm.registry import Registry

__all__ = ["cache_sim", "sim_console"]

#: Number of columns if the output is not a terminal. Each row of a table fits into one line.
_PIPE_WIDTH = 200

#: Name for all caches or strategies that can run on this machine.
_ALL = "all"


def cache_sim(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="File with recorded requests, one JSON object per line.")
    ],
    capacities: Annotated[
        list[str] | None,
        typer.Option(
            "--capacity",
            metavar="TOKENS,...",
            help="Capacities in tokens, such as 500K,2M, or as a share of all distinct tokens of the trace, such as "
            "10%. Repeatable. [default: 1%,2%,5%,10%]",
        ),
    ] = None,
    evictions: Annotated[
        list[str] | None,
        typer.Option(
            "--eviction",
            metavar="NAME,...",
            help="Eviction strategies, with options as in slru:protected_share=0.5; `all` means all strategies. "
            "Repeatable.",
        ),
    ] = None,
    caches: Annotated[
        list[str] | None,
        typer.Option("--cache", metavar="NAME,...", help="Prefix caches, with options as for --eviction. Repeatable."),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option(
            "--page-size",
            min=1,
            help="Number of tokens in a page. It must divide the trace's block length, which is the default.",
        ),
    ] = None,
    block_tokens: Annotated[
        int,
        typer.Option(
            "--block-tokens",
            min=1,
            help="Number of tokens of a block (one hash id), for traces that do not contain this number.",
        ),
    ] = 512,
    in_flight: Annotated[
        int,
        typer.Option(
            "--in-flight",
            min=0,
            metavar="N",
            help="Lock the prefixes of the last N requests, as if these requests were still running.",
        ),
    ] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Save all figures as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw hit rate against capacity, as PNG or SVG.")
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar. [default: on a terminal]")
    ] = None,
) -> None:
    """Replay recorded requests through caches and eviction strategies, and compare hit rates with the offline optimum.

    No model is loaded. The configuration's `cache` section gives the values of --cache, --eviction and --page-size
    where these are not set. Its `plugins` section loads plugins that are not installed.
    """
    from graftlm.cache_sim import (
        Study,
        check_overwrites_none,
        check_writable,
        parse_capacities,
        print_study,
        read_trace,
        save_plot,
        save_studies,
    )
    from graftlm.plotting import check_plotting
    from graftlm.registry import Registry

    if plot is not None:
        check_plotting(plot)
    for path, option in ((as_json, "--json"), (plot, "--plot")):
        if path is not None:
            check_overwrites_none(path, option, [*traces, *([config] if config is not None else [])])
            check_writable(path, option)
    settings = load_config(config, overrides)
    registry = Registry.load(settings.plugins)
    study = Study(
        registry,
        _choices(caches, settings, registry, "cache"),
        _choices(evictions, settings, registry, "eviction"),
        parse_capacities(capacities or ["1%,2%,5%,10%"]),
        page_size or _configured_page_size(settings),
        in_flight,
    )
    study.check()
    found = _run(study, [read_trace(path, block_tokens) for path in traces], progress)
    console = sim_console()
    for one in found:
        print_study(one, console)
    if as_json is not None:
        save_studies(found, as_json)
        print(f"saved as {as_json}")
    if plot is not None:
        save_plot(found, plot)
        print(f"plot saved as {plot}")


def _run(study: Study, traces: list[Trace], progress: bool | None) -> list[TraceStudy]:
    from graftlm.progress import progress_bar

    num_requests = study.num_replays * sum(len(trace.requests) for trace in traces)
    with progress_bar(num_requests, progress, "replaying") as advance:
        return [study.run(trace, advance) for trace in traces]


def _choices(texts: list[str] | None, settings: EngineConfig, registry: Registry, family: str) -> list[Choice]:
    """Return the choices on the command line, or the configuration's choice if there are none."""
    from graftlm.cache_sim import Choice, parse_choices

    if not texts:
        configured = settings.cache if family == "cache" else settings.cache.eviction
        return [Choice(configured.name, configured.options)]
    chosen = [choice for text in texts for choice in parse_choices(text)]
    if _ALL not in [choice.name for choice in chosen]:
        return chosen
    named = {choice.name for choice in chosen}
    others = [Choice(provider.name) for provider in registry.available(family) if provider.name not in named]
    return [*(choice for choice in chosen if choice.name != _ALL), *sorted(others, key=str)]


def _configured_page_size(settings: EngineConfig) -> int | None:
    """Return the page size that a configuration sets; None if it has the default, which suits engines, not traces."""
    return settings.cache.page_size if settings.sources["cache.page_size"] != "default" else None


def sim_console() -> Console:
    """Return the console for the tables of a simulation."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
