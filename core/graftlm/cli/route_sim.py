"""`graftlm route-sim`, which compares routing policies on recorded requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftlm.cli.cache_sim import sim_console
from graftlm.cli.options import ConfigOption, SetOption, load_config

if TYPE_CHECKING:
    from graftlm.cache_sim import Choice, Trace
    from graftlm.config.sections import CacheSettings, EvictionSettings
    from graftlm.registry import Registry
    from graftlm.route_sim import RouteStudy, TraceRouteStudy

__all__ = ["route_sim"]

#: Name for all policies that can run on this machine.
_ALL = "all"


def route_sim(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="File with recorded requests, one JSON object per line.")
    ],
    replicas: Annotated[
        str, typer.Option("--replicas", metavar="N,...", help="Numbers of replicas, such as 4,64,1000.")
    ] = "4",
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME,...",
            help="Routing policies, with options as in cache_aware:imbalance=0.1; `all` means all policies. "
            "Repeatable. [default: all]",
        ),
    ] = None,
    capacity: Annotated[
        str, typer.Option("--capacity", metavar="TOKENS", help="Capacity of each replica's cache, such as 500K or 2M.")
    ] = "1M",
    cache: Annotated[
        str | None, typer.Option("--cache", metavar="NAME", help="The prefix cache of each replica.")
    ] = None,
    eviction: Annotated[
        str | None, typer.Option("--eviction", metavar="NAME", help="The eviction strategy of each replica.")
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
    cost: Annotated[
        str | None,
        typer.Option(
            "--cost",
            metavar="NAME=NUMBER,...",
            help="Duration of a step: step_ms for each step, prefill_us for each prompt token, decode_us for each "
            "decode row. [default: measured on the bundled model]",
        ),
    ] = None,
    event_delay_ms: Annotated[
        float,
        typer.Option("--event-delay-ms", min=0, help="Time until the router knows of a change of a replica's cache."),
    ] = 5.0,
    speedup: Annotated[
        float, typer.Option("--speedup", min=0.001, help="Factor by which requests arrive faster than in the trace.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of policies that use random numbers.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Save all figures as JSON.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw hit rate, load and TTFT over the replicas, as PNG or SVG."),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar. [default: on a terminal]")
    ] = None,
) -> None:
    """Replay recorded requests over simulated replicas, and compare routing policies.

    No model is loaded. The replicas have real prefix caches and simulated steps. The configuration's sections `cache`
    and `scheduling` give the values of --cache, --eviction and --page-size, and the limits of steps. Its `plugins`
    section loads plugins that are not installed.
    """
    from graftlm.cache_sim import check_overwrites_none, check_writable, parse_capacities, parse_choices, read_trace
    from graftlm.plotting import check_plotting
    from graftlm.registry import Registry
    from graftlm.route_sim import (
        ReplicaLimits,
        RouteStudy,
        StepCosts,
        parse_replicas,
        print_route_study,
        save_route_plot,
        save_route_studies,
    )

    if plot is not None:
        check_plotting(plot)
    for path, option in ((as_json, "--json"), (plot, "--plot")):
        if path is not None:
            check_overwrites_none(path, option, [*traces, *([config] if config is not None else [])])
            check_writable(path, option)
    settings = load_config(config, overrides)
    registry = Registry.load(settings.plugins)
    scheduling, configured = settings.scheduling, settings.cache
    study = RouteStudy(
        registry,
        _policies(policies, registry),
        parse_replicas(replicas),
        _one(parse_choices(cache), "--cache") if cache else _choice(configured),
        _one(parse_choices(eviction), "--eviction") if eviction else _choice(configured.eviction),
        parse_capacities([capacity])[0],
        page_size or (configured.page_size if settings.sources["cache.page_size"] != "default" else None),
        StepCosts() if cost is None else StepCosts.parse(cost),
        ReplicaLimits(scheduling.max_running_requests, scheduling.prefill_tokens_per_step),
        event_delay_ms / 1000,
        speedup,
        seed,
    )
    study.check()
    found = _run(study, [read_trace(path, block_tokens) for path in traces], progress)
    console = sim_console()
    for one in found:
        print_route_study(one, console)
    if as_json is not None:
        save_route_studies(found, as_json)
        print(f"saved as {as_json}")
    if plot is not None:
        save_route_plot(found, plot)
        print(f"plot saved as {plot}")


def _run(study: RouteStudy, traces: list[Trace], progress: bool | None) -> list[TraceRouteStudy]:
    from graftlm.progress import progress_bar

    num_requests = study.num_runs * sum(len(trace.requests) for trace in traces)
    with progress_bar(num_requests, progress, "replaying") as advance:
        return [study.run(trace, advance) for trace in traces]


def _policies(texts: list[str] | None, registry: Registry) -> list[Choice]:
    """Return the policies on the command line; all if there are none."""
    from graftlm.cache_sim import Choice, parse_choices

    chosen = [choice for text in texts or [_ALL] for choice in parse_choices(text)]
    if _ALL not in [choice.name for choice in chosen]:
        return chosen
    named = {choice.name for choice in chosen}
    others = [Choice(one.name) for one in registry.available("routing_policy") if one.name not in named]
    return [*(choice for choice in chosen if choice.name != _ALL), *sorted(others, key=str)]


def _choice(configured: CacheSettings | EvictionSettings) -> Choice:
    from graftlm.cache_sim import Choice

    return Choice(configured.name, configured.options)


def _one(choices: list[Choice], option: str) -> Choice:
    from graftlm.errors import ConfigError

    if len(choices) != 1:
        raise ConfigError(f"{option}: expected one name, got {', '.join(map(str, choices))}")
    return choices[0]
