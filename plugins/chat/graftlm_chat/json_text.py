"""Finds brackets in text that arrives in pieces, and reads and writes JSON."""

import json
from math import isinf
from typing import Any

__all__ = ["BracketScanner", "dump", "load_object"]


class BracketScanner:
    """Finds closing brackets in text that arrives in pieces. It interprets only brackets and strings.

    Args:
        opening: the opening brackets.
        closing: the closing brackets.
        quotes: characters that start and end a string.
        depth: number of brackets that are open at the start.

    Attributes:
        depth: number of open brackets at the current position.
    """

    def __init__(self, *, opening: str = "{[", closing: str = "}]", quotes: str = '"', depth: int = 0) -> None:
        self.depth = depth
        self._opening, self._closing, self._quotes = opening, closing, quotes
        self._quote: str | None = None
        self._escaped = False

    def find_depth(self, text: str, start: int, depth: int) -> int | None:
        """Read text from `start` up to the bracket that reduces the depth to `depth`.

        Returns: the index after that bracket; None if all text was read without finding it.
        """
        for i in range(start, len(text)):
            if self._closes(text[i]) and self.depth == depth:
                return i + 1
        return None

    def find_closing(self, text: str, start: int, stop: int) -> int | None:
        """Read text from `start` up to the next closing bracket.

        Returns: the index after that bracket; None if the text up to `stop` was read without finding one.
        """
        return next((i + 1 for i in range(start, min(stop, len(text))) if self._closes(text[i])), None)

    def _closes(self, char: str) -> bool:
        """Read a character. Returns whether it is a closing bracket."""
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
    """Return the JSON object in a text; None if the text is not an object, or has a number outside a float's range."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def dump(value: object) -> str:
    """Return a value as JSON on one line. Unpaired surrogates are escaped, because UTF-8 cannot encode them.

    Raises:
        ValueError: the value contains an infinity or NaN.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value)


def is_unicode(text: str) -> bool:
    """Return whether a text has no unpaired surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _finite(text: str) -> float:
    value = float(text)
    return _refuse(text) if isinf(value) else value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
