"""JSON schemas from text, and the errors of whoever reads on in them."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isinf
from typing import Any, Final, NoReturn

from graftlm.errors import GrammarError

__all__ = ["MAX_DEPTH", "reading_schema"]

#: Of schemas in schemas.
MAX_DEPTH: Final = 48

_HALF_OF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")


@contextmanager
def reading_schema(text: str) -> Iterator[Any]:
    """Yield the value that a text spells in JSON; what is refused in the block is refused as a JSON schema.

    Raises:
        GrammarError: it is not JSON, holds a number that double precision cannot, or the block refuses it.
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
    """Refuse text that no encoding has.

    Raises:
        GrammarError: a string holds half of a surrogate pair.
    """
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        raise GrammarError(f"{path}: half of a surrogate pair is no character, got {json.dumps(value)[:80]}")
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
        raise GrammarError(f"{text} is too large a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"{name} is not JSON")
