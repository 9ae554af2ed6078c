"""Refuses the parts of a specification that cannot be enforced, or leaves them out and reports them."""

import json
from typing import Final, NoReturn

from graftlm.errors import GrammarError

__all__ = ["Enforcement", "NotEnforcedError", "refuse", "show"]


#: Maximum total length of the paths of one specification, in characters. Paths are stored with the compiled grammar.
_MAX_PATH_CHARS: Final = 2**17


class NotEnforcedError(GrammarError):
    """A specification is well formed, but a part of it cannot be enforced."""


class Enforcement:
    """Collects the keywords that a translation leaves out, in order.

    Args:
        strict: whether keywords that cannot be enforced are refused.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._paths: list[str] = []
        self._num_chars = 0

    @property
    def is_strict(self) -> bool:
        """Whether keywords that cannot be enforced are refused."""
        return self._strict

    @property
    def unenforced(self) -> tuple[str, ...]:
        """The paths of the keywords left out so far, without duplicates."""
        return tuple(dict.fromkeys(self._paths))

    def leave_out(self, path: str, message: str) -> None:
        """Record that a keyword is not enforced.

        Args:
            path: location of the keyword, such as `$.items.uniqueItems`.
            message: why it is not enforced, for the error.

        Raises:
            NotEnforcedError: the specification is strict.
            GrammarError: the paths are too long in total.
        """
        if self._strict:
            is_plain = "enforced" in message and "strict" not in message
            hint = f"{'' if message.endswith('.') else '.'} With strict false it is left out." if is_plain else ""
            raise NotEnforcedError(f"{path}: {message}{hint}")
        self._num_chars += len(path)
        if self._num_chars > _MAX_PATH_CHARS:
            raise GrammarError(
                f"{path[:80]}: the paths of keywords that are not enforced have more than {_MAX_PATH_CHARS:,} "
                "characters in total"
            )
        self._paths.append(path)


def refuse(path: str, message: str) -> NoReturn:
    """Refuse a keyword that is malformed or allows no value, also if the specification is not strict.

    Raises:
        GrammarError: always.
    """
    raise GrammarError(f"{path}: {message}")


def show(value: object) -> str:
    """Return a value as JSON for an error message, at most 80 characters."""
    return json.dumps(value)[:80]
