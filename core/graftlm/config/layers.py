"""Layers of raw values with their origins. Values of later layers replace values of earlier layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydantic import BaseModel

from graftlm.config.section import Section
from graftlm.shortening import shortened

__all__ = [
    "GIVEN",
    "MAX_DEPTH",
    "KeyPath",
    "Layer",
    "Origin",
    "Problem",
    "dotted",
    "expand",
    "given",
    "known",
    "merge",
    "origin_of",
]

#: Keys from the root to a value. The key of a list element is its index.
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value.

    Attributes:
        source: text for `graftlm config show`: "engine.yaml:7", "engine.yaml:7 (${PORT})", "--set" or "given".
        location: start of an error message: "engine.yaml:7" or "--set"; "" for values from a program.
        line: line number, by which errors are sorted.
    """

    source: str
    location: str = ""
    line: int = 0


#: Maximum nesting depth of lists and mappings.
MAX_DEPTH: Final = 100
_SHOWN_PATH_CHARS: Final = 200
_SHOWN_MESSAGE_CHARS: Final = 1000

#: Origin of values from a program.
GIVEN = Origin("given")


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a configuration."""

    path: KeyPath
    message: str
    origin: Origin = GIVEN

    def __str__(self) -> str:
        path = shortened(dotted(self.path), _SHOWN_PATH_CHARS)
        message = shortened(self.message, _SHOWN_MESSAGE_CHARS)
        return ": ".join(part for part in (self.origin.location, path, message) if part)


@dataclass(frozen=True, slots=True)
class Layer:
    """The raw values of one source, or of several merged sources.

    Attributes:
        values: nested dicts with string keys.
        origins: key path -> origin, for every key of `values`.
        problems: errors for values that could not be read.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def dotted(path: KeyPath) -> str:
    """Return a key path as text, such as `cache.eviction.name` or `plugins.modules[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def origin_of(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> Origin:
    """Return the origin of the value at a path, or of the nearest enclosing value."""
    for end in range(len(path), -1, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return GIVEN


def given(values: Mapping[Any, Any] | BaseModel, origin: Origin = GIVEN) -> Layer:
    """Return the layer of values from a program, which may be mappings or section objects."""
    origins: dict[KeyPath, Origin] = {}
    problems: list[Problem] = []

    def plain(value: Any, path: KeyPath) -> Any:
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        if not isinstance(value, Mapping):
            return value
        if len(path) > MAX_DEPTH:
            problems.append(Problem(path, f"mappings are nested more than {MAX_DEPTH} deep", origin))
            return {}
        result = {}
        for key, item in value.items():
            if not isinstance(key, str):
                problems.append(Problem(path, f"keys must be strings, got {key!r}", origin))
                continue
            origins[(*path, key)] = origin
            result[key] = plain(item, (*path, key))
        return result

    return Layer(plain(values, ()), origins, tuple(problems))


def expand(layer: Layer, root: type[Section]) -> Layer:
    """Replace all shorthands (`cache: radix`) by mappings, so that layers merge key by key."""
    origins = dict(layer.origins)

    def section(kind: type[Section], values: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        result = dict(values)
        for name in values.keys() & kind.model_fields.keys():
            inner, here = kind.model_fields[name].annotation, (*path, name)
            if not (isinstance(inner, type) and issubclass(inner, Section)):
                continue
            value = inner.written_out(values[name])
            if isinstance(values[name], str) and inner.shorthand is not None:
                origins[(*here, inner.shorthand)] = origin_of(here, origins)
            result[name] = section(inner, value, here) if isinstance(value, dict) else value
        return result

    return Layer(section(root, layer.values, ()), origins, layer.problems)


def known(layer: Layer, root: type[Section]) -> Layer:
    """Return a layer without its unknown keys; the sections in the layer must be expanded."""

    def section(kind: type[Section], values: dict[str, Any]) -> dict[str, Any]:
        result = {}
        for name in values.keys() & kind.model_fields.keys():
            inner, value = kind.model_fields[name].annotation, values[name]
            if isinstance(inner, type) and issubclass(inner, Section) and isinstance(value, dict):
                value = section(inner, value)
            result[name] = value
        return result

    return Layer(section(root, layer.values), layer.origins, layer.problems)


def merge(layers: Sequence[Layer]) -> Layer:
    """Merge layers in order. Mappings are merged key by key, other values are replaced."""
    values: dict[str, Any] = {}
    origins: dict[KeyPath, Origin] = {}
    for layer in layers:
        values = _overlay(values, layer.values, (), origins)
        origins.update(layer.origins)
    return Layer(values, origins, tuple(problem for layer in layers for problem in layer.problems))


def _overlay(
    below: dict[str, Any], above: dict[str, Any], path: KeyPath, origins: dict[KeyPath, Origin]
) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old, here = merged.get(key), (*path, key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _overlay(old, value, here, origins)
            continue
        merged[key] = value
        for stale in [p for p in origins if p[: len(here)] == here]:
            del origins[stale]
    return merged
