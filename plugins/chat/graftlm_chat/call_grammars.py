"""Creates the grammars of calls that are JSON objects."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.contracts import CallGrammar, GrammarKind, GrammarSpec, Tool, ToolChoice

__all__ = ["call_head", "call_list", "tagged_calls"]

#: Keywords whose values are data, not schemas.
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
_SCHEMAS_BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def call_head(name: str, key: str) -> str:
    """Return the text of a call's object up to its arguments, which are the value of `key`."""
    return f'{{"name": "{name}", "{key}": '


def tagged_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    key: str,
    opening: str = "",
    closing: str = "",
) -> CallGrammar:
    """Return a structural tag with one structure per tool: the start of the tool's call, then the call's arguments.

    Args:
        tools: the tools that may be called.
        choice: whether at least one call is required.
        parallel: whether more than one call is allowed.
        key: key of the arguments in the object.
        opening: text before each object; it is the trigger of a call. "": the start of the object is the trigger.
        closing: text after each object.
    """
    structures = [
        {"begin": opening + call_head(tool.name, key), "schema": tool.parameters, "end": "}" + closing}
        for tool in tools
    ]
    triggers = [opening.rstrip()] if opening else [f'{{"name": "{tool.name}"' for tool in tools]
    tag = {
        "triggers": triggers,
        "structures": structures,
        "at_least_one": choice is ToolChoice.REQUIRED,
        "stop_after_first": not parallel,
    }
    return _grammar(GrammarKind.STRUCTURAL_TAG, tag, tools, "$.structures[{}].schema")


def call_list(tools: Sequence[Tool], *, parallel: bool, key: str) -> CallGrammar:
    """Return the JSON schema of a list of calls. Unless `parallel`, the list has exactly one call."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    schema = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "$defs": {f"tool{i}": _moved(tool.parameters, f"#/$defs/tool{i}") for i, tool in enumerate(tools)},
    }
    return _grammar(GrammarKind.JSON_SCHEMA, schema, tools, "$.$defs.tool{}")


def _grammar(kind: GrammarKind, value: object, tools: Sequence[Tool], place: str) -> CallGrammar:
    spec = GrammarSpec(kind, json.dumps(value), strict=all(tool.strict for tool in tools))
    return CallGrammar(spec, tuple(place.format(i) for i in range(len(tools))))


def _moved(schema: Any, place: str) -> Any:
    """Return a copy of a schema, with its references adapted to its new location `place`, a JSON pointer."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_keyword(key, value, place) for key, value in schema.items()}


def _moved_keyword(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    if key in _DATA:
        return value
    if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _moved(schema, place) for name, schema in value.items()}
    return _moved(value, place)
