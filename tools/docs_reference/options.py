"""The fields of pydantic models for a reference: path, type with its bounds, default, description."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from docs_reference.markdown import code, plain, table

__all__ = ["Option", "describe_type", "list_options", "option_table"]

_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a pydantic model.

    Attributes:
        path: dotted path from the listed model.
        type: description in words.
        default: default value as JSON; None if a value is required.
        description: the description of the pydantic field.
    """

    path: str
    type: str
    default: str | None
    description: str


def list_options(model: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    """Yield the fields of a model; nested models' fields have dotted paths."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from list_options(field.annotation, f"{prefix}{name}.")
            continue
        given = schema["properties"][name]
        default = None if field.is_required() else _default(field.get_default(call_default_factory=True))
        yield Option(f"{prefix}{name}", describe_type(given, schema.get("$defs", {})), default, field.description or "")


def option_table(options: Iterator[Option]) -> str:
    """Return a table of options; "" if there are none."""
    rows = [
        [
            code(option.path),
            option.type,
            "required" if option.default is None else code(option.default),
            plain(option.description),
        ]
        for option in options
    ]
    return table(["Option", "Type", "Default", "Meaning"], rows) if rows else ""


def _default(value: Any) -> str:
    """Return a default in the notation of a configuration."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def describe_type(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Describe in words the values that a JSON schema allows."""
    if "$ref" in schema:
        return describe_type(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema:
        return ", ".join(code(_default(value)) for value in schema["enum"])
    if "const" in schema:
        return code(_default(schema["const"]))
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return " or ".join(describe_type(part, definitions) for part in schema[alternatives])
    match schema.get("type"):
        case "null":
            return "`null`"
        case "array":
            return f"list of {describe_type(schema.get('items', {}), definitions)}"
        case "object":
            return "mapping"
        case str(name):
            return f"{name}{_bounds(schema)}"
    return "any"


def _bounds(schema: Mapping[str, Any]) -> str:
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in _BOUNDS.items() if key in schema]
    return f" {' and '.join(bounds)}".replace("<", "&lt;") if bounds else ""


def _number(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"
