"""Saves plots as files, and checks beforehand that this is possible."""

from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plotting", "save_figure"]

_SUFFIXES = (".png", ".svg")


def check_plotting(path: Path) -> None:
    """Check, before any work is done, that a plot can be saved.

    Raises:
        ConfigError: matplotlib is not installed, or the file's suffix is not .png or .svg.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot writes PNG or SVG files, got {path}; name it {path.with_suffix('.png')}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}). Install it: pip install 'graftlm[plot]'") from error


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a plot in the format of the file's suffix.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror or error}") from error
