"""The reference of HTTP endpoints: every public route, its summary, and the fields of its request body."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final
from unittest.mock import Mock

from docs_reference.markdown import code, plain, table
from docs_reference.options import describe_type
from graftlm.config import EngineConfig
from graftlm.processes.replicas import ReplicaSet
from graftlm.server.app import create_app
from graftlm.server.batches import make_batch_router
from graftlm.server.metrics import ServerMetrics, make_router

__all__ = ["api_description", "endpoints_page", "fields_of", "operations"]

_HEAD = """\
# Endpoint reference

This page lists every public route of the server's `/openapi.json`. [The server](../server.md) has examples and explains
the behaviour under load and failure. For SGLang's clients, `PUT /generate`, `GET /flush_cache`, `GET /start_profile`,
`GET /stop_profile`, `GET /get_model_info` and `GET /get_server_info` are aliases of `POST /generate`,
`POST /flush_cache`, `POST /start_profile`, `POST /stop_profile`, `GET /model_info` and `GET /server_info`.
`POST /concate_and_append_request` is accepted without effect: SGLang's frontend calls it after it has joined texts,
which the prefix cache finds in the next request.
"""


#: Schemas of nested objects whose fields have separate rows in the table of a request body.
_SPELT_OUT: Final = frozenset({"SamplingRequest", "StreamOptions"})


@cache
def api_description() -> dict[str, Any]:
    """Return the OpenAPI description of a server; routes are only declared, so no engine is needed."""
    manager = Mock(config=EngineConfig(), replicas=ReplicaSet(["scheduler-0"], can_recover=False))
    routers = [make_router(ServerMetrics()), make_batch_router(Mock(), EngineConfig())]
    description: dict[str, Any] = create_app(manager, extra_routers=routers).openapi()
    return description


def endpoints_page() -> str:
    """Return the page: routes by purpose, then the fields of request bodies."""
    description = api_description()
    parts = [_HEAD]
    for tag in description["tags"]:
        tagged = [entry for entry in operations(description) if tag["name"] in entry[2].get("tags", ())]
        rows = [[code(f"{method.upper()} {path}"), plain(about["summary"])] for method, path, about in tagged]
        parts += [f"## {code(tag['name'])}\n\n{plain(tag['description'])}\n", table(["Route", "Answers"], rows)]
        parts += [_body(f"{method.upper()} {path}", about, description) for method, path, about in tagged]
    return "\n".join(parts)


def operations(description: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (method, path, OpenAPI description) of each route."""
    for path, methods in description["paths"].items():
        for method, about in methods.items():
            yield method, path, about


def _body(route: str, about: Mapping[str, Any], description: Mapping[str, Any]) -> str:
    """Return the fields of a JSON body; "" for routes without a body."""
    schemas = description["components"]["schemas"]
    rows = [
        [
            code(name),
            describe_type(field, schemas),
            "required" if is_required else _default(field),
            plain(field.get("description", "")),
        ]
        for name, field, is_required in fields_of(about, schemas)
    ]
    return f"### {code(route)}\n\n{table(['Field', 'Type', 'Default', 'Meaning'], rows)}" if rows else ""


def fields_of(about: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return (name, schema, whether it is required) of the fields of an operation's JSON body."""
    body = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return _fields_in(body, schemas)


def _fields_in(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the fields of a schema, including those of its `anyOf` alternatives, each followed by nested fields."""
    if "$ref" in body:
        body = schemas[body["$ref"].rpartition("/")[2]]
    alternatives = [field for part in body.get("anyOf", ()) for field in _fields_in(part, schemas)]
    required = body.get("required", ())
    fields = [(name, field, name in required) for name, field in body.get("properties", {}).items()]
    return alternatives + [row for field in fields for row in (field, *_fields_below(*field[:2], schemas))]


def _fields_below(
    name: str, field: Mapping[str, Any], schemas: Mapping[str, Any]
) -> list[tuple[str, dict[str, Any], bool]]:
    """Return the fields of a field's object, with dotted names, if its schema or an alternative is in `_SPELT_OUT`."""
    if "$ref" in field:
        kind = field["$ref"].rpartition("/")[2]
        below = _fields_in(field, schemas) if kind in _SPELT_OUT else []
        return [(f"{name}.{inner}", schema, required) for inner, schema, required in below]
    for alternatives in ("anyOf", "oneOf"):
        rows = [row for part in field.get(alternatives, ()) for row in _fields_below(name, part, schemas)]
        if rows:
            return list({row[0]: row for row in rows}.values())
    return []


def _default(field: Mapping[str, Any]) -> str:
    return code(json.dumps(field["default"])) if "default" in field else ""
