"""Converts the output types of Outlines, and of Python, to JSON schemas, regular expressions and grammars."""

from types import FunctionType, UnionType
from typing import Any, get_origin

from graftlm.errors import SamplingParamsError

__all__ = ["as_specification", "is_output_type"]


def is_output_type(value: object) -> bool:
    """Return whether a value is a type: a term of Outlines, a class, a type hint (`Literal["a"]`) or a function."""
    return (
        type(value).__module__.partition(".")[0] in ("outlines", "genson")
        or isinstance(value, type | UnionType | FunctionType)
        or get_origin(value) is not None
    )


def as_specification(name: str, value: Any) -> tuple[str, str | dict[str, Any]]:
    """Return the field of SamplingParams that constrains the output to a type, and the field's value.

    Pydantic classes need no other package. Outlines converts the other types.

    Args:
        name: name of the field that the user set, for error messages.
        value: the type.

    Returns: "json_schema" with a dict or its JSON text, "regex" with a regular expression, or "ebnf" with a grammar.

    Raises:
        SamplingParamsError: Outlines is not installed, or the type cannot be converted.
    """
    to_schema = getattr(value, "model_json_schema", None)
    if isinstance(value, type) and to_schema is not None:
        try:
            return "json_schema", to_schema()
        except Exception as error:  # of Pydantic, or of the class
            raise SamplingParamsError(f"{name}: {value!r:.200} has no JSON schema: {error}") from error
    try:
        from outlines.types.dsl import CFG, JsonSchema, python_types_to_terms, to_regex
    except ImportError:
        raise SamplingParamsError(
            f"{name}: types except pydantic classes need Outlines: pip install 'graftlm[outlines]'; got {value!r:.200}"
        ) from None
    try:
        term = python_types_to_terms(value)
        if isinstance(term, CFG):
            return "ebnf", term.definition
        if isinstance(term, JsonSchema) and term.whitespace_pattern is None:
            return "json_schema", term.schema
        return "regex", to_regex(term)
    except Exception as error:  # also of Pydantic, and of functions in the type
        raise SamplingParamsError(f"{name}: Outlines cannot convert {value!r:.200}: {error}") from error
