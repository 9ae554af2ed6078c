"""What commands share: the arguments that name a configuration, and the form of errors."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

__all__ = ["ConfigFile", "ConfigOption", "SetOption", "fail", "warn"]

#: Exit status when the arguments, the configuration or a plugin is wrong.
USAGE_ERROR = 2

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A configuration in YAML.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A configuration in YAML.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value, as in cache.page_size=16. Repeatable."),
]


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def fail(lines: Iterable[str]) -> NoReturn:
    """Print errors to stderr and exit."""
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    sys.exit(USAGE_ERROR)
