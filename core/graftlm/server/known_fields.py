"""Fields of other servers' requests. Clients send these fields with their default values.

`known_fields.json` lists the fields: path of the endpoint -> server or client -> field -> default. A path may end with
"#" and the name of a field of the body. The listed fields then belong to the object in this field.

A field that graftlm does not have is accepted if its value is the default, null, false, "", [] or {}, because such a
value has no effect. Fields of graftlm that contain a name, such as an adapter's, also accept these empty values.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic_core import PydanticCustomError

from graftlm.server.errors import FOREIGN_FIELD

__all__ = ["KnownField", "is_empty", "known_fields", "without_defaults", "without_empty"]

_FILE = Path(__file__).with_name("known_fields.json")

#: Fields of graftlm's requests that contain names or specifications. They have no effect if they are empty.
_NAMING: Final = frozenset(
    {
        "cache_salt",
        "chat_template_kwargs",
        "choice",
        "conversation_id",
        "custom_labels",
        "ebnf",
        "encoding_format",
        "extra_key",
        "grammar_backend",
        "guided_choice",
        "guided_decoding_backend",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "logit_bias",
        "logits_processors",
        "lora_path",
        "model",
        "reasoning_begin",
        "reasoning_effort",
        "reasoning_end",
        "regex",
        "request_id",
        "response_format",
        "rid",
        "routing_key",
        "session_id",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "stream_options",
        "structural_tag",
        "structured_outputs",
        "tool_choice",
        "tools",
        "user",
    }
)

#: Fields with a JSON schema. The schema {} allows any JSON, and false allows none.
_SCHEMAS: Final = frozenset({"guided_json", "json_schema"})


@dataclass(frozen=True, slots=True)
class KnownField:
    """A field of other servers.

    Attributes:
        servers: the servers that have the field at this endpoint, with their versions; empty if they have the field
            only at other endpoints.
        defaults: the default value of the field in each of these servers, as JSON values.
    """

    servers: tuple[str, ...]
    defaults: tuple[Any, ...]

    def is_default(self, value: Any) -> bool:
        """Return whether a value has no effect, because it is empty or a default value."""
        return is_empty(value) or any(_is_equal(value, default) for default in self.defaults)


@cache
def known_fields(path: str) -> Mapping[str, KnownField]:
    """Return the fields of other servers by name.

    Args:
        path: path of an endpoint. The result includes fields of other endpoints, without servers and defaults.
    """
    table: dict[str, dict[str, dict[str, Any]]] = json.loads(_FILE.read_text(encoding="utf-8"))
    fields: dict[str, KnownField] = {}
    for where, servers in table.items():
        for server, defaults in servers.items():
            for name, default in defaults.items():
                known = fields.get(name, KnownField((), ()))
                if where == path:
                    known = KnownField((*known.servers, server), (*known.defaults, default))
                fields[name] = known
    return fields


def without_defaults(body: Mapping[str, Any], own: Collection[str], path: str) -> Mapping[str, Any]:
    """Return a request's fields, except other servers' fields that have their default values.

    Args:
        body: the request, or an object in it.
        own: the names of the fields that graftlm has.
        path: path for `known_fields`.

    Raises:
        PydanticCustomError: of type FOREIGN_FIELD; a field that other servers have at this endpoint is not set to its
            default value.
    """
    foreign = [name for name in body if name not in own]
    if not foreign:
        return body
    fields = known_fields(path)
    kept = {name for name in foreign if name not in fields or not fields[name].is_default(body[name])}
    for name in foreign:
        if name in kept and name in fields and fields[name].servers:
            context = {"name": name, "servers": " and ".join(fields[name].servers)}
            raise PydanticCustomError(
                FOREIGN_FIELD, "is a field of {servers} and is not supported by this server; leave it out", context
            )
    return {name: value for name, value in body.items() if name in own or name in kept}


def without_empty(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request's fields, except fields in `_NAMING` whose value is "", [], {} or false.

    A JSON schema may be {} or false.
    """
    empty = [name for name in _NAMING & body.keys() if body[name] is not None and _names_nothing(name, body[name])]
    return {name: value for name, value in body.items() if name not in empty} if empty else body


def _names_nothing(name: str, value: Any) -> bool:
    return is_empty(value) and not (name in _SCHEMAS and (value is False or isinstance(value, dict)))


def is_empty(value: Any) -> bool:
    """Return whether a JSON value is null, false or has no elements."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _is_equal(value: Any, default: Any) -> bool:
    """Return whether two JSON values are equal. 1 and true are not equal."""
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)
