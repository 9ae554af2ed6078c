"""Brackets of text that comes in pieces, and the JSON within."""

import json
from math import isinf
from typing import Any

__all__ = ["BracketScanner", "dump", "load_object"]


class BracketScanner:
    """Finds where brackets close, in text that comes in pieces. Brackets and strings count, the rest may be anything.

    Attributes:
        depth: of brackets, where it has read to.
    """

    def __init__(self, *, opening: str = "{[", closing: str = "}]", quotes: str = '"', depth: int = 0) -> None:
        self.depth = depth
        self._opening, self._closing, self._quotes = opening, closing, quotes
        self._quote: str | None = None
        self._escaped = False

    def find_depth(self, text: str, start: int, depth: int) -> int | None:
        """Read text from `start` on, up to the bracket that brings the depth down to `depth`.

        Returns: the index after that bracket; None when the text ends before, all of it read.
        """
        for i in range(start, len(text)):
            if self._closes(text[i]) and self.depth == depth:
                return i + 1
        return None

    def find_closing(self, text: str, start: int, stop: int) -> int | None:
        """Read text from `start` on, up to the next bracket that closes.

        Returns: the index after that bracket; None when there is none before `stop`, all of it read.
        """
        return next((i + 1 for i in range(start, min(stop, len(text))) if self._closes(text[i])), None)

    def _closes(self, char: str) -> bool:
        """Read a character; returns whether it is a bracket that closes."""
        if self._quote is not None:
            self._read_in_string(char)
        elif char in self._quotes:
            self._quote = char
        elif char in self._opening:
            self.depth += 1
        elif char in self._closing:
            self.depth -= 1
            return True
        return False

    def _read_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = None


def load_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text spells; None when it is anything else, or holds a number no float can."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def dump(value: object) -> str:
    """Return a value as JSON on one line; half a surrogate pair, which no answer could carry, stays escaped.

    Raises:
        ValueError: it holds an infinite number, or none at all.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Whether a text holds no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _finite(text: str) -> float:
    value = float(text)
    return _refuse(text) if isinf(value) else value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
