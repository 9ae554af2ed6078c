"""The descriptions of answers in the OpenAPI document, which contain the JSON schemas of the answers' structs."""

from types import UnionType
from typing import Any

import msgspec

__all__ = ["described"]

_REF = "#/components/{name}"


def described(
    answer: type[msgspec.Struct],
    events: type[msgspec.Struct] | UnionType | None = None,
    stream: str = (
        "server-sent events: each event has a part of the answer after `data: `, and the last event is `[DONE]`"
    ),
) -> dict[int | str, Any]:
    """Return the `responses` of a route.

    Args:
        answer: struct of the answer.
        events: struct of each event of a stream; None if the route does not stream.
        stream: a description of the stream.
    """
    content = {"application/json": {"schema": _schema(answer)}}
    description = "The answer."
    if events is not None:
        content["text/event-stream"] = {"schema": _schema(events)}
        description = f"The answer; with `stream`, {stream}."
    return {200: {"description": description, "content": content}}


def _schema(kind: type[msgspec.Struct] | UnionType) -> Any:
    """Return a JSON schema without references, because FastAPI cannot add their targets to the OpenAPI document."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_REF)
    return _inlined(schema, {_REF.format(name=name): part for name, part in components.items()})


def _inlined(schema: Any, components: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(part, components) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"]], components)
    return {key: _inlined(part, components) for key, part in schema.items()}
