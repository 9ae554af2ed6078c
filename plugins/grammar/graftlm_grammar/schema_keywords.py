"""Lists the keywords of JSON schemas: enforced ones, annotations, and other keywords with the types of their values."""

import difflib
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from graftlm_grammar.disjoint import json_type
from graftlm_grammar.enforcement import Enforcement, refuse, show

__all__ = [
    "ANNOTATIONS",
    "COMBINED",
    "ENFORCED",
    "asserted",
    "bound_hint",
    "check_decimals",
    "check_items",
    "leave_out",
    "leave_out_unknown",
    "type_names",
]

#: Keywords that do not restrict values.
ANNOTATIONS: Final = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator",
        "example", "examples", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip

#: Type -> the keywords that are enforced for values of this type.
ENFORCED: Final[dict[str, frozenset[str]]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(),
    "null": frozenset(),
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
            "maxProperties",
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
}  # fmt: skip

#: Keywords that are enforced only if the other keywords are annotations. `enum` and `const` may be used with `type`.
COMBINED: Final = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")

#: Keywords that can be left out -> the JSON types of their values. A value of another type is malformed.
_TYPES_OF_VALUES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), ("object", "boolean")),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems", "additionalItems"), ("object", "boolean")),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), ("object",)),
    **dict.fromkeys(("minContains", "maxContains"), ("integer",)),
    "uniqueItems": ("boolean",),
}

#: All known keywords, to suggest one for a misspelt keyword.
_ALL: Final = sorted(ANNOTATIONS.union({"type"}, COMBINED, _TYPES_OF_VALUES, *ENFORCED.values()))
_MIN_SIMILARITY: Final = 0.75
_MAX_MISSPELT_LEN: Final = 40
#: Maximum number of decimals of a bound. Each decimal needs a nested group.
_MAX_DECIMALS: Final = 40


def asserted(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords of a schema that restrict values."""
    return [
        key
        for key in schema
        if key not in ANNOTATIONS and not key.startswith("x-") and (key, schema[key]) != ("uniqueItems", False)
    ]


def check_items(schema: Mapping[str, Any], path: str) -> None:
    """Refuse a list as `items`, which was valid up to draft 7.

    Raises:
        GrammarError: `items` is a list; the message names the replacement.
    """
    if isinstance(schema.get("items"), list):
        refuse(f"{path}.items", "expected one schema, got a list; write prefixItems for a schema of each item")


def bound_hint(value: Any) -> str:
    """Return a hint for the error about a bound: how to replace draft 4's boolean form of an exclusive bound.

    Returns "" if the value is not a boolean.
    """
    return "; write the bound itself, as in exclusiveMinimum: 5" if isinstance(value, bool) else ""


def check_decimals(enforcement: Enforcement, value: float, path: str) -> bool:
    """Leave out a bound that has too many decimals. Returns whether the bound is kept.

    Raises:
        NotEnforcedError: the bound has too many decimals, and the schema is strict.
    """
    exponent = Decimal(repr(value)).as_tuple().exponent
    if isinstance(exponent, int) and exponent >= -_MAX_DECIMALS:
        return True
    enforcement.leave_out(path, f"bounds are enforced only up to {_MAX_DECIMALS} decimals, got {show(value)}")
    return False


def leave_out(enforcement: Enforcement, schema: Mapping[str, Any], key: str, path: str, message: str) -> None:
    """Leave out the keyword `key` of the schema at `path`.

    Raises:
        NotEnforcedError: the schema is strict; `message` is part of the error.
        GrammarError: the keyword's value is malformed.
    """
    path = f"{path}.{key}"
    types = _TYPES_OF_VALUES.get(key)
    enforcement.leave_out(path, message)
    if types is not None and json_type(schema[key]) not in types:
        refuse(path, f"expected {' or '.join(types)}, got {show(schema[key])}")


def leave_out_unknown(enforcement: Enforcement, schema: Mapping[str, Any], key: str, path: str) -> None:
    """Leave out the keyword `key`, which no translation enforces.

    Raises:
        NotEnforcedError: the schema is strict; the message suggests a keyword if `key` seems to be misspelt.
        GrammarError: the keyword's value is malformed.
    """
    may_be_misspelt = enforcement.is_strict and key not in _ALL and len(key) <= _MAX_MISSPELT_LEN
    close = difflib.get_close_matches(key, _ALL, n=1, cutoff=_MIN_SIMILARITY) if may_be_misspelt else []
    message = (
        f"unknown keyword; did you mean '{close[0]}'?"
        if close
        else "this keyword is not enforced; leave it out, or set strict to false"
    )
    leave_out(enforcement, schema, key, path, message)


def type_names(wanted: Any, path: str) -> list[str]:
    """Return the types of a `type` keyword without duplicates.

    Args:
        wanted: value of the keyword `type`.
        path: location of the keyword.

    Raises:
        GrammarError: the value is malformed.
    """
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n in ENFORCED for n in names):
        refuse(path, f"expected one or more of {', '.join(ENFORCED)}, got {show(wanted)}")
    return list(dict.fromkeys(names))
