"""Command-line options of vLLM and SGLang, and graftlm's settings with the same meaning.

`other_options.json` has two lists. `settings`: options with a setting of graftlm. `none`: reasons why options have no
setting, each with the names of its options.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer
import typer.core

from graftlm.cli.options import fail

__all__ = ["OtherOption", "ServeCommand", "other_options"]

_FILE: Final = Path(__file__).with_name("other_options.json")


@dataclass(frozen=True, slots=True)
class OtherOption:
    """An option of vLLM, SGLang or both, or several options with the same reason.

    Attributes:
        names: the options on the command line.
        setting: graftlm's setting, as PATH or PATH=VALUE; None if there is none.
        note: how the setting differs from the option, or the reason why there is no setting.
    """

    names: tuple[str, ...]
    setting: str | None = None
    note: str = ""

    def advice(self, name: str) -> str:
        """Return a message with the replacement of the option `name`."""
        if self.setting is None:
            return f"graftlm serve has no option {name}: {self.note}"
        value = "" if "=" in self.setting else "=VALUE"
        note = f" ({self.note})" if self.note else ""
        path = self.setting.partition("=")[0]
        return f"graftlm serve has no option {name}; the setting is {path}: --set {self.setting}{value}{note}"


@cache
def other_options() -> tuple[OtherOption, ...]:
    """Return the options of `other_options.json`, first those with a setting."""
    known = json.loads(_FILE.read_text(encoding="utf-8"))
    with_setting = (OtherOption(tuple(row["names"]), row["setting"], row.get("note", "")) for row in known["settings"])
    return *with_setting, *(OtherOption(tuple(row["names"]), None, row["reason"]) for row in known["none"])


@cache
def _by_name() -> Mapping[str, OtherOption]:
    return {name: option for option in other_options() for name in option.names}


class ServeCommand(typer.core.TyperCommand):
    """A command that refuses other servers' options, and names the settings to use instead."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the command line.

        Raises:
            SystemExit: the command line contains an option of another server.
        """
        own = {name for parameter in self.params for name in parameter.opts} | set(ctx.help_option_names)
        foreign = [name for name in _given(args) if name not in own]
        lines = [_by_name()[key].advice(name) for name in foreign if (key := _listed_name(name)) in _by_name()]
        if lines:
            fail(lines)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


def _given(args: Sequence[Any]) -> list[str]:
    """Return the names of the options before a "--", without repetitions."""
    words = list(args)
    words = words[: words.index("--")] if "--" in words else words
    return list(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("-")))


def _listed_name(name: str) -> str:
    """Return the name in the list: vLLM also accepts `--max_model_len`, and `--compilation-config.mode` for one key."""
    return name.partition(".")[0].replace("_", "-")
