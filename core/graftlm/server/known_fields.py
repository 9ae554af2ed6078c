"""Fields of other servers' requests, which clients send at their defaults.

`known_fields.json` lists them with their defaults: path of the endpoint -> server or client -> field -> default. A part
after "#" names a field of the body that is an object. A field that graftlm does not have is accepted at its default and
at null, false, "", [] and {}, which request nothing.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from graftlm.server.errors import FOREIGN_FIELD

__all__ = ["KnownField", "is_empty", "known_fields", "without_defaults"]

_FILE = Path(__file__).with_name("known_fields.json")


@dataclass(frozen=True, slots=True)
class KnownField:
    """A field of other servers.

    Attributes:
        servers: those that have it at an endpoint, with their versions; none: it is known at other endpoints only.
        defaults: JSON values.
    """

    servers: tuple[str, ...]
    defaults: tuple[Any, ...]

    def is_default(self, value: Any) -> bool:
        """Return whether a value requests nothing."""
        return is_empty(value) or any(_is_equal(value, default) for default in self.defaults)


@cache
def known_fields(path: str) -> Mapping[str, KnownField]:
    """Return other servers' fields by name.

    Args:
        path: an endpoint's; a field that is known at other endpoints only has neither servers nor defaults.
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
    """Return a request's fields without those of other servers that are at their defaults.

    Args:
        body: the request, or an object in it.
        own: the fields that graftlm has.
        path: as of `known_fields`.

    Raises:
        PydanticCustomError: of type FOREIGN_FIELD; a field that other servers have at this endpoint has another value.
    """
    foreign = [name for name in body if name not in own]
    if not foreign:
        return body
    fields = known_fields(path)
    kept = {name for name in foreign if name not in fields or not fields[name].is_default(body[name])}
    for name in foreign:
        if name in kept and name in fields and fields[name].servers:
            context = {"name": name, "servers": " and ".join(fields[name].servers)}
            raise PydanticCustomError(FOREIGN_FIELD, "a field of {servers}, not supported here; leave it out", context)
    return {name: value for name, value in body.items() if name in own or name in kept}


def is_empty(value: Any) -> bool:
    """Return whether a JSON value is null, false or has no elements."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _is_equal(value: Any, default: Any) -> bool:
    """Return whether two JSON values are equal; 1 is no true."""
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)
