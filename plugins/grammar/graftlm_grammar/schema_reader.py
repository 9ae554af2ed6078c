"""JSON schemas from text, and the errors of whoever reads on in them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import isinf
from typing import Any, Final, NoReturn

from graftlm.errors import GrammarError

__all__ = ["MAX_DEPTH", "reading_schema"]

#: Of schemas in schemas.
MAX_DEPTH: Final = 48


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
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None


def _finite_float(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise GrammarError(f"{text} is too large a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise GrammarError(f"{name} is not JSON")
