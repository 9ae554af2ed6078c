"""Translates the schemas of JSON strings, numbers, booleans and null to EBNF expressions."""

from collections.abc import Mapping
from math import ceil, floor
from typing import Any, Final

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import IN_JSON_STRING
from graftlm_grammar.disjoint import json_type
from graftlm_grammar.ebnf import MAX_COUNT
from graftlm_grammar.enforcement import Enforcement, NotEnforcedError, refuse, show
from graftlm_grammar.formats import FORMATS
from graftlm_grammar.json_ebnf import JsonRules, repeated
from graftlm_grammar.number_ranges import Bound, integers_between, multiples_of, numbers_between
from graftlm_grammar.regex import regex_to_ebnf
from graftlm_grammar.schema_keywords import bound_hint, check_decimals

__all__ = ["counts", "pattern_expression", "scalar_expression"]

_MAX_BOUND: Final = 2**63
_MAX_MULTIPLE: Final = 256  # each remainder needs a rule
_MAX_LEAST: Final = 1000  # a matcher's memory grows with the square of this count
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def scalar_expression(
    name: str, schema: Mapping[str, Any], path: str, rules: JsonRules, enforcement: Enforcement
) -> str:
    """Return the expression of the values of one type.

    Args:
        name: `string`, `integer`, `number`, `boolean` or `null`.
        schema: the schema.
        path: location of the schema.
        rules: the rules of JSON.
        enforcement: records keywords that are not enforced.

    Raises:
        GrammarError: a keyword is malformed, no value is valid, or the schema is strict and a keyword is not enforced.
    """
    if name == "string":
        return _string(schema, path, enforcement) or rules.string()
    if name == "integer":
        return _integer(schema, path, rules, enforcement)
    if name == "number":
        return _number(schema, path, enforcement) or rules.number()
    return '"true" | "false"' if name == "boolean" else '"null"'


def counts(
    schema: Mapping[str, Any], keys: tuple[str, str], path: str, enforcement: Enforcement
) -> tuple[int, int | None]:
    """Return the minimum and the maximum that two keywords set; the maximum is None if the schema sets none.

    Args:
        schema: the schema.
        keys: the keywords of the minimum and of the maximum.
        path: location of the schema.
        enforcement: records counts that are too large.

    Raises:
        GrammarError: a count is malformed, the maximum is less than the minimum, or a count is too large and the
            schema is strict.
    """
    found: list[int | None] = []
    for key, limit in zip(keys, (_MAX_LEAST, MAX_COUNT), strict=True):
        if key not in schema:
            found.append(None)
            continue
        value = schema[key]
        message = f"expected a whole number from 0 to {limit}, got {show(value)}"
        if json_type(value) != "integer" or value < 0:
            refuse(f"{path}.{key}", message)
        elif value > limit:
            enforcement.leave_out(f"{path}.{key}", message)
            found.append(None)
        else:
            found.append(int(value))
    least, most = found[0] or 0, found[1]
    if most is not None and most < least:
        refuse(f"{path}.{keys[1]}", f"{most} is less than {keys[0]}, {least}")
    return least, most


def pattern_expression(pattern: Any, path: str) -> str:
    """Return the expression of the JSON strings, including quotes, whose whole text matches a pattern.

    Raises:
        NotEnforcedError: a grammar cannot express the pattern.
        GrammarError: the pattern is malformed.
    """
    if not isinstance(pattern, str):
        refuse(path, f"expected a string, got {json_type(pattern)}")
    try:
        return _quoted(regex_to_ebnf(pattern, IN_JSON_STRING))
    except GrammarError as error:
        raise type(error)(f"{path}: {error}") from None


def _quoted(expression: str) -> str:
    return f'"\\"" ({expression}) "\\""'


def _string(schema: Mapping[str, Any], path: str, enforcement: Enforcement) -> str | None:
    """Return the expression of a string with a pattern, format or length; None if the schema sets none of them."""
    least, most = counts(schema, ("minLength", "maxLength"), path, enforcement)
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    found: list[tuple[str, list[str]]] = []
    for expression, keys in (
        (_string_pattern(schema, path, enforcement), ["pattern"]),
        (_string_format(schema, path, enforcement), ["format"]),
        (_quoted(repeated(JsonRules.PLAIN_CHAR, least, most)) if (least, most) != (0, None) else None, lengths),
    ):
        if expression is not None:
            found.append((expression, keys))
    for _, keys in found[1:]:
        for key in keys:
            message = f"not enforced together with {found[0][1][0]}: use only one of pattern, format and length"
            enforcement.leave_out(f"{path}.{key}", message)
    return found[0][0] if found else None


def _string_pattern(schema: Mapping[str, Any], path: str, enforcement: Enforcement) -> str | None:
    if "pattern" not in schema:
        return None
    path = f"{path}.pattern"
    try:
        return pattern_expression(schema["pattern"], path)
    except NotEnforcedError as error:
        enforcement.leave_out(path, str(error).removeprefix(f"{path}: "))
        return None


def _string_format(schema: Mapping[str, Any], path: str, enforcement: Enforcement) -> str | None:
    if "format" not in schema:
        return None
    name, path = schema["format"], f"{path}.format"
    if not isinstance(name, str):
        refuse(path, f"expected a string, got {json_type(name)}")
    if name not in FORMATS:
        enforcement.leave_out(path, f"{show(name)} is not enforced. Enforced are: {', '.join(sorted(FORMATS))}.")
        return None
    return _quoted(regex_to_ebnf(FORMATS[name], IN_JSON_STRING))


def _integer(schema: Mapping[str, Any], path: str, rules: JsonRules, enforcement: Enforcement) -> str:
    low, high = _bounds(schema, path, enforcement)
    step = _step(schema, low is not None or high is not None, path, enforcement)
    if step is not None and not rules.MAY_REPEAT:
        enforcement.leave_out(f"{path}.multipleOf", "not enforced by outlines; use xgrammar or llguidance.")
    elif step is not None:
        for rule, body in multiples_of(step, f"m{step}").items():
            rules.add(rule, body)
        return f"m{step}"
    first = None if low is None else floor(low.value) + 1 if not low.inclusive else ceil(low.value)
    last = None if high is None else ceil(high.value) - 1 if not high.inclusive else floor(high.value)
    return integers_between(first, last) or refuse(path, "there is no integer between these bounds")


def _step(schema: Mapping[str, Any], is_bounded: bool, path: str, enforcement: Enforcement) -> int | None:
    """Return the number that an integer must be a multiple of; None if the schema sets none."""
    if "multipleOf" not in schema:
        return None
    step, path = schema["multipleOf"], f"{path}.multipleOf"
    message = f"expected a whole number from 1 to {_MAX_MULTIPLE}, got {show(step)}"
    if json_type(step) not in ("integer", "number") or not step > 0:
        refuse(path, message)
    if is_bounded or "number" in schema.get("type", "integer"):
        enforcement.leave_out(path, "enforced only for type integer, without bounds")
        return None
    if json_type(step) != "integer" or step > _MAX_MULTIPLE:
        enforcement.leave_out(path, message)
        return None
    return int(step)


def _number(schema: Mapping[str, Any], path: str, enforcement: Enforcement) -> str | None:
    """Return the expression of a number with bounds; None if the schema has no bounds."""
    low, high = _bounds(schema, path, enforcement)
    if low is None and high is None:
        return None
    return numbers_between(low, high) or refuse(path, "there is no number between these bounds")


def _bounds(schema: Mapping[str, Any], path: str, enforcement: Enforcement) -> tuple[Bound | None, Bound | None]:
    """Return the tightest lower and upper bound of a schema; None if it has none."""
    found: dict[str, Bound] = {}
    for key in _BOUNDS:
        if key not in schema:
            continue
        value = schema[key]
        message = f"expected a number from -2**63 to 2**63, got {show(value)}"
        if json_type(value) not in ("integer", "number"):
            refuse(f"{path}.{key}", message + bound_hint(value))
        if abs(value) > _MAX_BOUND:
            enforcement.leave_out(f"{path}.{key}", message)
            continue
        if not check_decimals(enforcement, value, f"{path}.{key}"):
            continue
        found[key] = Bound.of(value, inclusive=not key.startswith("exclusive"))
    lows = [found[key] for key in ("minimum", "exclusiveMinimum") if key in found]
    highs = [found[key] for key in ("maximum", "exclusiveMaximum") if key in found]
    low = max(lows, key=lambda bound: (bound.value, not bound.inclusive), default=None)
    return low, min(highs, key=lambda bound: (bound.value, bound.inclusive), default=None)
