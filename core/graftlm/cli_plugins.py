"""`graftlm plugins`: what is installed, where it comes from, whether it runs here."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graftlm.cli_options import ConfigOption, SetOption

if TYPE_CHECKING:
    from graftlm.registry import Registry

__all__ = ["plugins"]

_PIPE_WIDTH = 200  # columns when nobody looks: wide enough that a line of the table stays one line


def plugins(
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Judge availability for this device.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List every plugin: family, name, where it comes from, whether it runs here or why not."""
    from graftlm.config import EngineConfig
    from graftlm.registry import Registry, probe_platform

    settings = EngineConfig.load(config, overrides or ())
    registry = Registry.load(settings.plugins, platform=probe_platform(device or settings.model.device))
    if as_json:
        typer.echo(json.dumps(_as_json(registry), indent=2))
    else:
        _print_table(registry)


def _as_json(registry: Registry) -> dict[str, object]:
    return {
        "providers": [dataclasses.asdict(entry) for entry in registry.entries()],
        "failures": [
            {
                "plugin": failure.plugin.name,
                "distribution": failure.plugin.distribution,
                "version": failure.plugin.version,
                "family": failure.family,
                "provider": failure.provider,
                "error": str(failure),
            }
            for failure in registry.failures
        ],
    }


def _print_table(registry: Registry) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("family", "name", "distribution", "version", "available", box=None, pad_edge=False)
    for entry in registry.entries():
        state = Text("yes", "green") if entry.unavailable is None else Text(f"no: {entry.unavailable}", "yellow")
        table.add_row(entry.family, entry.name, entry.distribution, entry.version or "", state)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    for failure in registry.failures:
        console.print(Text(f"failed: {failure}", "red"), soft_wrap=True)
