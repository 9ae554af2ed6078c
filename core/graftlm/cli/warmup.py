"""`graftlm warmup`, which compiles the kernels of a configuration, so that the next start is faster."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graftlm.cli.options import SetOption, TargetArgument, load_config, split_target
from graftlm.runtime.kernel_events import KernelUse, KernelWatch, watching

if TYPE_CHECKING:
    from graftlm.engine.engine import Engine

__all__ = ["warmup"]

_WARMUP_TOKENS = 4


def warmup(
    target: TargetArgument = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="PATH", help="A checkpoint folder, or `demo`, the bundled model.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Compile the kernels that a configuration needs and that the wheel does not contain, and print a table of them.

    The command starts an engine in this process, as `graftlm serve` does, runs one request and ends. The next start
    finds every kernel compiled. Exits with 2 if the configuration, a plugin or the checkpoint is wrong.
    """
    from graftlm.engine.engine import Engine

    file, model = split_target(target, model)
    fields: dict[str, Any] = {} if model is None else {"model": {"path": model}}
    config = load_config(file, overrides, **fields)
    start_s = time.monotonic()
    with watching(KernelWatch()) as watch, Engine(config) as engine:
        _run_once(engine)
        seconds = time.monotonic() - start_s
    for line in kernel_table(watch.uses):
        print(line)
    print(watch.report() or "compiled nothing")
    print(f"{config.model.path}: started and ran a request in {seconds:.1f} s")


def kernel_table(uses: Sequence[KernelUse]) -> list[str]:
    """Return the lines of a table with one row per kernel. A kernel that was loaded twice has one row."""
    first: dict[Path, KernelUse] = {}
    for use in uses:
        first.setdefault(use.library, use)
    rows = [("kernel", "seconds", "level", "from", "file")]
    rows += [(use.name, f"{use.seconds:.1f}", use.level, use.origin, str(use.library)) for use in first.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)] + [row[-1]]) for row in rows
    ]


def _run_once(engine: "Engine") -> None:
    """Run one request, because some kernels are loaded by the first request."""
    from graftlm.errors import UnsupportedFeatureError

    prompt = [0]
    try:
        engine.generate(prompt, {"max_tokens": _WARMUP_TOKENS, "temperature": 0.0, "ignore_eos": True})
    except UnsupportedFeatureError:  # the model only embeds or classifies
        engine.embed(prompt)
