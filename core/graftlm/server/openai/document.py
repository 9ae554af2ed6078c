"""What the API's own description says of answers: the schemas of the structs that are written."""

from typing import Any

import msgspec

__all__ = ["described"]

_REF = "#/components/{name}"


def described(answer: type[msgspec.Struct], events: type[msgspec.Struct] | None = None) -> dict[int | str, Any]:
    """Return the `responses` of a route.

    Args:
        answer: what it writes.
        events: what each event of a stream holds.
    """
    content = {"application/json": {"schema": _schema(answer)}}
    description = "The answer."
    if events is not None:
        content["text/event-stream"] = {"schema": _schema(events)}
        description = "The answer; with `stream`, events of `data: ` and a part of it each, the last one `[DONE]`."
    return {200: {"description": description, "content": content}}


def _schema(kind: type[msgspec.Struct]) -> Any:
    """Return a JSON schema without references: FastAPI has no place for further components."""
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
