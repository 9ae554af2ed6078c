"""What becomes of the parts of a specification that cannot be enforced: refused, or left out and named."""

import json
from typing import Final, NoReturn

from graftlm.errors import GrammarError

__all__ = ["Enforcement", "NotEnforcedError", "refuse", "show"]


#: Characters of paths, of one specification: they are kept as long as its answer may be asked for again.
_MAX_TOLD: Final = 2**17


class NotEnforcedError(GrammarError):
    """A specification is well formed, and asks for what cannot be enforced."""


class Enforcement:
    """Collects what a translation leaves out, in the order in which it is come across."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._paths: list[str] = []
        self._num_chars = 0

    @property
    def is_strict(self) -> bool:
        """Whether nothing may be left out."""
        return self._strict

    @property
    def unenforced(self) -> tuple[str, ...]:
        """Keywords left out so far, each with its path and once."""
        return tuple(dict.fromkeys(self._paths))

    def leave_out(self, path: str, message: str) -> None:
        """Note that a keyword is not enforced.

        Args:
            path: of the keyword, such as `$.items.uniqueItems`.

        Raises:
            NotEnforcedError: nothing may be left out.
            GrammarError: too much is.
        """
        if self._strict:
            is_plain = "enforced" in message and "strict" not in message
            hint = f"{'' if message.endswith('.') else '.'} With strict false it is left out." if is_plain else ""
            raise NotEnforcedError(f"{path}: {message}{hint}")
        self._num_chars += len(path)
        if self._num_chars > _MAX_TOLD:
            raise GrammarError(f"{path[:80]}: the paths of what is not enforced have over {_MAX_TOLD:,} characters")
        self._paths.append(path)


def refuse(path: str, message: str) -> NoReturn:
    """Refuse what is malformed, or has no valid value, whether or not something may be left out."""
    raise GrammarError(f"{path}: {message}")


def show(value: object) -> str:
    """Return a value as an error quotes it."""
    return json.dumps(value)[:80]
