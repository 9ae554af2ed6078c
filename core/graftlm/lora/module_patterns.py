"""Looks up values by patterns of module names, in the format of `peft`, in bounded time.

`peft` matches module names with regular expressions. Adapters are untrusted input, and Python's `re` can take
exponential time on a name of 40 characters while it holds the GIL. Therefore plain names, which nearly all adapters
have, are compared as text. Regular expressions are matched by Rust's engine, whose time is linear in the length of the
name. Syntax that can make an expression large, such as counted repetition, is refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, Generic, TypeVar

from pydantic_core import SchemaError, SchemaValidator, core_schema

from graftlm.errors import AdapterError

__all__ = ["ModulePatterns"]

V = TypeVar("V")

_PLAIN: Final = re.compile(r"[\w.-]+", re.ASCII)
_SAFE: Final = re.compile(r"(?:[\w.*+?|()\[\]^$-]|\(\?:|\\[.dw_-])+", re.ASCII)
_MAX_PATTERN_LEN, _MAX_NUM_PATTERNS = 500, 100
#: ASCII classes; Rust's own classes contain all of Unicode and are large.
_CLASSES: Final[Mapping[str, str]] = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}


class ModulePatterns(Generic[V]):
    """Finds the value of the first pattern that matches a module's whole name or its end after a dot.

    Args:
        values: pattern -> value. A pattern of letters, digits, `_`, `-` and dots is a name; any other is a regular
            expression.
        entry: name of the patterns in error messages.

    Raises:
        AdapterError: a pattern is not a supported regular expression.
    """

    def __init__(self, values: Mapping[str, V], entry: str) -> None:
        self._names: dict[str, tuple[int, V]] = {}  # name -> (index in `values`, value)
        self._expressions: list[tuple[int, SchemaValidator, V]] = []
        for place, (pattern, value) in enumerate(values.items()):
            if _PLAIN.fullmatch(pattern):
                self._names[pattern] = (place, value)
            elif len(self._expressions) < _MAX_NUM_PATTERNS:
                self._expressions.append((place, _compiled(pattern, entry), value))
            else:
                raise AdapterError(
                    f"{entry} has more than {_MAX_NUM_PATTERNS} regular expressions. Use the names of modules."
                )

    def find(self, module: str) -> V | None:
        """Return the value for a module; None if no pattern matches."""
        found = [self._names[ending] for ending in _endings(module) if ending in self._names]
        first = min(found, key=lambda placed: placed[0], default=None)
        for place, expression, value in self._expressions:
            if first is not None and first[0] < place:
                break
            if expression.isinstance_python(module):
                return value
        return None if first is None else first[1]


def _endings(module: str) -> Iterator[str]:
    """Yield the ends of a name after dots; for a.b.c: a.b.c, b.c and c."""
    yield module
    while "." in module:
        module = module.partition(".")[2]
        yield module


def _compiled(pattern: str, entry: str) -> SchemaValidator:
    if len(pattern) > _MAX_PATTERN_LEN or not _SAFE.fullmatch(pattern):
        raise AdapterError(
            f"{entry}: {pattern!r:.200} is not supported. A pattern has up to {_MAX_PATTERN_LEN} characters: names, "
            r"and the regular expressions . * + ? | () (?:) [] ^ $ \. \d \w. Use the names of modules instead."
        )
    try:
        return SchemaValidator(
            core_schema.str_schema(
                pattern=rf"^(?:(?:.*\.)?(?:{_without_unicode(pattern)}))$", regex_engine="rust-regex"
            )
        )
    except SchemaError as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise AdapterError(f"{entry}: {pattern!r:.200} is not a regular expression: {reason:.200}") from error


def _without_unicode(pattern: str) -> str:
    r"""Return a pattern with \d and \w replaced by ASCII classes, also inside brackets."""
    pieces, in_brackets = [], False
    for piece in re.findall(r"\\.|.", pattern):
        in_brackets = (in_brackets or piece == "[") and piece != "]"
        letters = _CLASSES.get(piece)
        pieces.append(piece if letters is None else letters if in_brackets else f"[{letters}]")
    return "".join(pieces)
