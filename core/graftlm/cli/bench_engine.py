"""`graftlm bench offline`, `roofline` and `ablation`, which measure an engine in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftlm.cli.options import ConfigOption, SetOption, fail, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from rich.console import Console

__all__ = ["ablation", "offline", "roofline"]

#: Number of columns if the output is not a terminal. Each row of a table then fits into one line.
_PIPE_WIDTH = 160

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="PATH", help="The checkpoint. It replaces the model of the configuration."),
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Save all figures as JSON.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw the figures, as PNG or SVG; needs matplotlib.")
]
ScaleOption = Annotated[float, typer.Option("--scale", min=0.0, help="Factor for the number of requests.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the prompts.")]
WorkloadOption = Annotated[
    list[str] | None, typer.Option("--workload", metavar="NAME,...", help="Run only these workloads. Repeatable.")
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Number of times that each measurement is made.")]
ProgressOption = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar. [default: on a terminal]")
]


def offline(
    model: ModelOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workloads: WorkloadOption = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            metavar="PATH=VALUE",
            help="A setting of a second engine, which is compared with the first. Repeatable.",
        ),
    ] = None,
    scale: ScaleOption = 1.0,
    seed: SeedOption = 0,
    rounds: RoundsOption = 3,
    as_json: JsonOption = None,
    progress: ProgressOption = None,
) -> None:
    """Run workloads on an engine in this process, without a server. The fastest run of each workload is reported.

    With --compare, runs of the two engines alternate, so that changes in the state of the machine affect both engines.
    """
    from contextlib import ExitStack

    from graftlm.bench.machine import Machine
    from graftlm.bench.offline import DEFAULT_WORKLOADS, WORKLOADS, alternate, fastest, print_runs
    from graftlm.engine.engine import Engine

    names = _names(workloads, WORKLOADS, DEFAULT_WORKLOADS, "--workload")
    settings = _settings(model, overrides)
    _check_results(as_json, None)
    variants = {"base": settings}
    if compare:
        variants[" ".join(compare)] = [*settings, *compare]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(load_config(config, values))) for name, values in variants.items()}
        path = engines["base"].config.model.path
        advance = stack.enter_context(_bar(progress)(rounds * len(names) * len(engines)))
        runs = fastest(alternate(engines, names, scale=scale, seed=seed, rounds=rounds, on_run=advance))
    machine = Machine.here()
    print_runs(runs, f"{Path(path).name}: {machine}", _console())
    about = {"machine": machine, "model": path, "config": None if config is None else str(config), "set": settings}
    _save({**about, "scale": scale, "seed": seed, "rounds": rounds, "runs": runs}, as_json)


def roofline(
    model: ModelOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    batch: Annotated[
        str, typer.Option("--batch", metavar="N,...", help="Numbers of requests in the decode steps.")
    ] = "1,16",
    context: Annotated[
        int, typer.Option("--context", min=1, help="Number of context tokens of each request that decodes.")
    ] = 512,
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="N,...", help="Numbers of tokens in the prefill chunks.")
    ] = "512,4096",
    rounds: RoundsOption = 7,
    as_json: JsonOption = None,
    plot: PlotOption = None,
    progress: ProgressOption = None,
) -> None:
    """Measure each operator of a step: bytes moved, operations, time, and the share of the hardware's ceiling.

    The ceilings are measured in the same run: the bandwidth of memory, and the speed of matrix products in the model's
    dtype.
    """
    from graftlm.bench.roofline import (
        Effort,
        fitting_cases,
        longest_context,
        open_rig,
        print_roofline,
        run_roofline,
        save_roofline_plot,
    )

    _check_results(as_json, plot)
    overridden = list(overrides or ())
    settings = load_config(config, _settings(model, overridden))
    batches, prefill_lens = _counts(batch, "--batch"), _counts(prefill, "--prefill")
    cases, left_out = fitting_cases(batches, context, prefill_lens, longest_context(settings))
    if not cases:
        fail(left_out)
    with open_rig(settings, cases) as rig, _bar(progress)(rounds * len(cases)) as advance:
        effort = Effort.for_device(rig.device, rounds)
        found = run_roofline(
            rig,
            cases,
            effort,
            model=settings.model.path,
            settings=overridden,
            left_out=left_out,
            on_turn=advance,
        )
    print_roofline(found, _console())
    _save(found, as_json)
    if plot is not None:
        save_roofline_plot(found, plot)
        print(f"plot saved as {plot}")


def ablation(
    model: ModelOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    workloads: WorkloadOption = None,
    off: Annotated[
        list[str] | None,
        typer.Option("--off", metavar="NAME,...", help="Switch off only these parts. Repeatable."),
    ] = None,
    scale: ScaleOption = 1.0,
    seed: SeedOption = 0,
    rounds: RoundsOption = 7,
    as_json: JsonOption = None,
    plot: PlotOption = None,
    progress: ProgressOption = None,
) -> None:
    """Run workloads on an unchanged engine and on engines with one part switched off, alternately.

    Parts: prefix_cache, overlap, prepacking, fused_ops, chunk_mixing, jump_forward, graphs. All engines are loaded at
    the same time.
    """
    from graftlm.bench.ablation import SWITCHES, print_ablation, run_ablation, save_ablation_plot
    from graftlm.bench.offline import WORKLOADS

    names = _names(workloads, WORKLOADS, WORKLOADS, "--workload")
    switches = _names(off, SWITCHES, SWITCHES, "--off")
    _check_results(as_json, plot)
    settings = _settings(model, overrides)
    found = run_ablation(
        load_config(config, settings),
        switches,
        names,
        settings=settings,
        scale=scale,
        seed=seed,
        rounds=rounds,
        watch=_bar(progress),
    )
    print_ablation(found, _console())
    _save(found, as_json)
    if plot is not None:
        save_ablation_plot(found, plot)
        print(f"plot saved as {plot}")


def _settings(model: str | None, overrides: list[str] | None) -> list[str]:
    return [*(overrides or ()), *(() if model is None else (f"model.path={model}",))]


def _names(texts: list[str] | None, known: Iterable[str], default: Iterable[str], option: str) -> list[str]:
    """Return the names in the values of an option, without repetitions. Without values, return the default names."""
    names = list(dict.fromkeys(part.strip() for text in texts or () for part in text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        fail([f"{option}: there is no {unknown[0]!r}. Available: {', '.join(known)}"])
    return names or list(default)


def _counts(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        fail([f"{option} must be numbers above 0 separated by commas, such as 1,16, got {text!r}"])
    return [int(part) for part in parts]


def _check_results(as_json: Path | None, plot: Path | None) -> None:
    """Check before a long run that its results can be saved.

    Raises:
        GraftlmError: a file cannot be written, or matplotlib is missing.
    """
    from graftlm.bench import check_writable
    from graftlm.plotting import check_plotting

    if plot is not None:
        check_plotting(plot)
    for path in (as_json, plot):
        if path is not None:
            check_writable(path)


def _save(result: object, path: Path | None) -> None:
    from graftlm.bench import save_json

    if path is not None:
        save_json(result, path)
        print(f"saved as {path}")


def _bar(progress: bool | None) -> Callable[[int], AbstractContextManager[Callable[[], None]]]:
    from graftlm.progress import progress_bar

    return lambda total: progress_bar(total, progress, "measuring")


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
