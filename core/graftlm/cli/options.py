"""The parts that commands share: options for the configuration, its loading, and the printing of errors."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from graftlm.shortening import shortened

if TYPE_CHECKING:
    from graftlm.config import EngineConfig

__all__ = [
    "ConfigFile",
    "ConfigOption",
    "SetOption",
    "TargetArgument",
    "fail",
    "load_config",
    "names_target",
    "split_target",
    "warn",
]

#: Exit status if the arguments, the configuration or a plugin is wrong.
USAGE_ERROR = 2

_MAX_LINE_CHARS = 2000
#: Texts with more characters are not searched as files.
_MAX_TARGET_CHARS = 200

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="Configuration file in YAML.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Configuration file in YAML.")]
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE|MODEL]",
        help="A configuration file in YAML, or a model: a checkpoint folder, a .gguf file, `demo`, or the name of "
        "a model in the local Hugging Face cache. Without this argument, the default configuration is used.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override a value of the configuration, such as cache.page_size=16. Repeatable.",
    ),
]


def load_config(
    file: Path | None, overrides: Sequence[str] | None, *, modules: Sequence[str] = (), **fields: Any
) -> "EngineConfig":
    """Load the configuration of a command, and make the folders of its plugin modules importable.

    Args:
        file: a YAML file; None for the defaults.
        overrides: the values of `--set`.
        modules: the values of `--module`.
        fields: sections that other options set.

    Effects: if there are modules of plugins, the file's folder and the current folder are appended to `sys.path`,
    because the script `graftlm` runs without them. The two folders come last, so that their files do not hide installed
    modules.

    Raises:
        ConfigError: the configuration is wrong.
    """
    from graftlm.config import EngineConfig

    config = EngineConfig.load(file, overrides or (), **fields)
    if modules or config.plugins.modules:
        file_folder = [] if file is None else [str(file.absolute().parent)]
        sys.path += [folder for folder in dict.fromkeys([*file_folder, str(Path.cwd())]) if folder not in sys.path]
    return config


def split_target(target: str | None, model: str | None) -> tuple[Path | None, str | None]:
    """Return the configuration file and the model of a command; None for one that the command line does not set.

    Args:
        target: the command's argument. It is a configuration if it ends with .yaml or .yml, or is an existing file
            without the suffix .gguf. Otherwise it is a model.
        model: the value of `--model`.
    """
    if target is None:
        return None, model
    path = Path(target)
    if path.suffix in (".yaml", ".yml") or (path.is_file() and path.suffix != ".gguf"):
        return path, model
    if model is not None and model != target:
        fail([f"two models are given: {target} and --model {model}"])
    return None, target


def names_target(text: str) -> bool:
    """Return whether a text is the bundled model's name, an existing model or configuration, or a cached hub model."""
    from graftlm.checkpoint import cached_snapshot, is_hub_name

    if text == "demo":
        return True
    if not 0 < len(text) <= _MAX_TARGET_CHARS or not text.isprintable():
        return False
    path = Path(text)
    is_file = path.suffix in (".yaml", ".yml", ".gguf") and path.is_file()
    return is_file or (path / "config.json").is_file() or (is_hub_name(text) and cached_snapshot(text) is not None)


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)


def fail(lines: Iterable[str]) -> NoReturn:
    """Print errors to stderr and exit with status 2. The middle of long lines is left out."""
    for line in lines:
        print(f"error: {shortened(line, _MAX_LINE_CHARS)}", file=sys.stderr)
    sys.exit(USAGE_ERROR)
