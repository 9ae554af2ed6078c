"""The plugin packages that `graftlm plugins new` writes.

Each family has a template, a working package with the name `new-plugin`. A copy replaces this name, in its two
spellings, and a few words about the family.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

from graftlm.errors import ConfigError
from graftlm.registry import FAMILIES, Family

__all__ = ["PluginPackage", "write_plugin_package"]

_TEMPLATES: Final = Path(__file__).parents[1] / "plugin_templates"
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_MAX_NAME_LEN: Final = 30
#: Family -> further arguments of `graftlm plugins check`, such as a checkpoint or the template's required options.
_CHECK_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"media": ("--checkpoint tiny",), "model": ("--checkpoint tiny",), "storage": ("--options path=check.sqlite",)}
)


@dataclass(frozen=True, slots=True)
class PluginPackage:
    """A new plugin package.

    Attributes:
        family: the family of its provider.
        name: the name of its provider in configurations.
    """

    family: Family
    name: str

    @classmethod
    def of(cls, family: str, name: str) -> "PluginPackage":
        """Return the package for a family's key and a plugin's name.

        Raises:
            ConfigError: the name is not valid.
        """
        if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_LEN or name == "auto":
            raise ConfigError(
                f"'{name}' is not a valid plugin name. Expected at most {_MAX_NAME_LEN} lower-case letters, digits and "
                f"single '-', starting with a letter, and not 'auto'; for example 'my-{family.replace('_', '-')}'."
            )
        return cls(FAMILIES[family], name)

    @property
    def distribution(self) -> str:
        """The name of the package in package indexes."""
        return f"graftlm-{self.name}"

    @property
    def module(self) -> str:
        """The name of the package's module."""
        return f"graftlm_{self.name.replace('-', '_')}"

    @property
    def check_commands(self) -> tuple[str, ...]:
        """The commands that check the installed package. They must be run in its folder."""
        check = " ".join(
            ["graftlm plugins check", f"{self.family.key}/{self.name}", *_CHECK_ARGUMENTS.get(self.family.key, ())]
        )
        if "--checkpoint tiny" not in check:
            return (check,)
        return f"python -m {self.module}.tiny_checkpoint tiny", check

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield (path in the package, text) of each file."""
        for folder in (_TEMPLATES / "common", _TEMPLATES / self.family.key):
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    text = file.read_text(encoding="utf-8")
                    path = self._named(file.relative_to(folder).as_posix())
                    yield Path(path), self._named(self._described(text) if folder.name == "common" else text)

    def _named(self, text: str) -> str:
        return text.replace("new-plugin", self.name).replace("new_plugin", self.name.replace("-", "_"))

    def _described(self, text: str) -> str:
        from graftlm import __version__

        words = {
            "CHECK COMMANDS": "\n    ".join(self.check_commands),
            "FAMILY TITLE": self.family.title,
            "FAMILY": self.family.key,
            "CONTRACT": self.family.contract.__name__,
            '"graftlm>=0"': f'"graftlm>={__version__}"',
        }
        for placeholder, word in words.items():
            text = text.replace(placeholder, word)
        return text


def write_plugin_package(package: PluginPackage, folder: Path) -> Path:
    """Write a working package, whose `engine.yaml` selects the plugin and whose tests pass.

    Args:
        folder: the folder to create. Its parents are also created.

    Returns: the folder.

    Raises:
        ConfigError: the folder exists or cannot be created, or a module with the package's name is installed.
    """
    if find_spec(package.module) is not None:
        raise ConfigError(
            f"The module '{package.module}' is already installed, and the package '{package.name}' would hide it. "
            "Choose another name."
        )
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already. Give another folder with --path, or remove it.") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}. Give another folder with --path.") from error
    for path, text in package.files():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
