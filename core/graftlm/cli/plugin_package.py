"""New plugin packages: what `graftlm plugins new` writes.

The templates are packages that work as they stand, one for each family, called `new-plugin`. Writing one replaces that
name, in its two spellings, and a few words about the family.
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
#: Family -> what `graftlm plugins check` needs besides the name: a checkpoint, or the template's required options.
_CHECK_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"model": ("--checkpoint tiny",), "storage": ("--options path=check.sqlite",)}
)


@dataclass(frozen=True, slots=True)
class PluginPackage:
    """What a new package is about.

    Attributes:
        family: of what it provides.
        name: what a configuration writes.
    """

    family: Family
    name: str

    @classmethod
    def of(cls, family: str, name: str) -> "PluginPackage":
        """Return the package for a family's key and a plugin's name.

        Raises:
            ConfigError: the name is not fit for a package.
        """
        if not _NAME.fullmatch(name) or len(name) > _MAX_NAME_LEN or name == "auto":
            raise ConfigError(
                f"'{name}' cannot be a plugin's name. Expected up to {_MAX_NAME_LEN} lower case letters, digits and "
                f"single '-', beginning with a letter, and not 'auto'; such as 'my-{family.replace('_', '-')}'."
            )
        return cls(FAMILIES[family], name)

    @property
    def distribution(self) -> str:
        """What package indexes call it."""
        return f"graftlm-{self.name}"

    @property
    def module(self) -> str:
        """What Python calls it."""
        return f"graftlm_{self.name.replace('-', '_')}"

    @property
    def check_commands(self) -> tuple[str, ...]:
        """The commands that check it, in its folder, once it is installed."""
        check = " ".join(
            ["graftlm plugins check", f"{self.family.key}/{self.name}", *_CHECK_ARGUMENTS.get(self.family.key, ())]
        )
        if self.family.key != "model":
            return (check,)
        return f"python -m {self.module}.tiny_checkpoint tiny", check

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield each file's path in the package, and its text."""
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
        for stand_in, word in words.items():
            text = text.replace(stand_in, word)
        return text


def write_plugin_package(package: PluginPackage, folder: Path) -> Path:
    """Write a package that works: installable, selected by its `engine.yaml`, with tests that pass.

    Args:
        folder: to be made; its parents are made, too.

    Returns: the folder.

    Raises:
        ConfigError: the folder is there already or cannot be made, or Python has a module of that name.
    """
    if find_spec(package.module) is not None:
        raise ConfigError(
            f"The module '{package.module}' is installed already: '{package.name}' would hide it. Take another name."
        )
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} is there already. Give another folder with --path, or remove it.") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}. Give another folder with --path.") from error
    for path, text in package.files():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
