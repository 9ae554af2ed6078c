"""Reads JSON schemas from text, and adds the prefix `json_schema:` to errors."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isinf
from typing import Any, Final, NoReturn

from graftlm.errors import GrammarError

__all__ = ["MAX_DEPTH", "reading_schema"]

#: Maximum nesting of schemas.
MAX_DEPTH: Final = 48

_HALF_OF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


@contextmanager
def reading_schema(text: str) -> Iterator[Any]:
    """Yield the JSON value of a text. Errors of the block get the prefix `json_schema:`.

    Raises:
        GrammarError: the text is not JSON, has a number outside the range of double precision, or the block
            raised the error.
    """
    try:
        yield _value(text)
    except RecursionError:
        raise GrammarError(f"json_schema: nested more than {MAX_DEPTH} levels deep") from None
    except GrammarError as error:
        raise GrammarError(f"json_schema: {error}") from None


def _value(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None
    if _HALF_OF_PAIR.search(text):
        _check_characters(value, "$")
    return value


def _check_characters(value: Any, path: str) -> None:
    """Check that all strings of a value can be encoded.

    Raises:
        GrammarError: a string has an unpaired surrogate.
    """
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise GrammarError(f"{path}: an unpaired surrogate is not a character, got {json.dumps(value)[:80]}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_characters(item, f"{path}[{i}]")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_characters(key, path)
            _check_characters(item, f"{path}.{key}")


def _finite_float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise GrammarError(f"the number {text} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"{name} is not JSON")
