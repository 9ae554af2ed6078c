"""What commands share: the arguments that name a configuration, how it is loaded, and the form of errors."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from graftlm.shortening import shortened

if TYPE_CHECKING:
    from graftlm.config import EngineConfig

__all__ = ["ConfigFile", "ConfigOption", "SetOption", "TargetArgument", "fail", "load_config", "split_target", "warn"]

#: Exit status when the arguments, the configuration or a plugin is wrong.
USAGE_ERROR = 2

_MAX_LINE_CHARS = 2000

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A configuration in YAML.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A configuration in YAML.")]
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE|MODEL]",
        help="A configuration in YAML, or a model: a checkpoint folder, a .gguf file, `demo`, or the name of a model "
        "in the local Hugging Face cache. Without it, the defaults.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a value, as in cache.page_size=16. Repeatable."),
]


def load_config(
    file: Path | None, overrides: Sequence[str] | None, *, modules: Sequence[str] = (), **fields: Any
) -> "EngineConfig":
    """Load the configuration of a command, so that the plugins it names are found beside it.

    Args:
        file: in YAML; None for the defaults.
        overrides: what `--set` gave.
        modules: what `--module` gave.
        fields: sections that other options gave.

    Effects: if it names modules of plugins, `sys.path` ends with the file's folder and the current one. The script
    `graftlm` has neither there. They come last, so that no file in them hides a module that is installed.

    Raises:
        ConfigError: something is wrong with it.
    """
    from graftlm.config import EngineConfig

    config = EngineConfig.load(file, overrides or (), **fields)
    if modules or config.plugins.modules:
        beside = [] if file is None else [str(file.absolute().parent)]
        sys.path += [folder for folder in dict.fromkeys([*beside, str(Path.cwd())]) if folder not in sys.path]
    return config


def split_target(target: str | None, model: str | None) -> tuple[Path | None, str | None]:
    """Return the configuration file and the model that a command's argument and `--model` name.

    Args:
        target: ends with .yaml or .yml, or is a file that is no .gguf file: a configuration; else a model.
    """
    if target is None:
        return None, model
    path = Path(target)
    if path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".gguf"):
        return path, model
    if model is not None and model != target:
        fail([f"two models are named: {target} and --model {model}"])
    return None, target


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def fail(lines: Iterable[str]) -> NoReturn:
    """Print errors to stderr, long lines without their middle, and exit."""
    for line in lines:
        print(f"error: {shortened(line, _MAX_LINE_CHARS)}", file=sys.stderr)
    sys.exit(USAGE_ERROR)
