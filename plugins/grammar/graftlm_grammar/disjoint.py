"""Checks whether a value can be valid under two JSON schemas."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from graftlm.errors import GrammarError
from graftlm_grammar.enforcement import Enforcement, NotEnforcedError

__all__ = ["check_disjoint", "json_type", "resolve", "types_of"]

_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")
_MAX_PAIRS: Final = 4096
_MAX_STEPS: Final = 400_000  # visited schemas, values and property names (about one second)


def json_type(value: Any) -> str:
    """Return the JSON Schema name of a value's type; `integer` for a whole number."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def resolve(root: Any, ref: Any, path: str) -> Any:
    """Return the schema that a `$ref` refers to.

    Args:
        root: the whole schema.
        ref: the value of `$ref`.
        path: location of the reference, for errors.

    Raises:
        NotEnforcedError: the reference is not of the form "#/name/name".
        GrammarError: the reference's target does not exist.
    """
    if not isinstance(ref, str):
        raise GrammarError(f"{path}: expected a string, got {json.dumps(ref)[:80]}")
    if not (ref == "#" or ref.startswith("#/")) or "~" in ref or "%" in ref:
        message = f"only references such as #/$defs/name are enforced, got {json.dumps(ref)[:80]}"
        raise NotEnforcedError(f"{path}: {message}")
    schema = root
    for name in ref.split("/")[1:]:
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and _INDEX.fullmatch(name) and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            raise GrammarError(f"{path}: the target of {ref[:80]} does not exist")
    return schema


def check_disjoint(root: Any, branches: list[Any], path: str, enforcement: Enforcement) -> None:
    """Check that no value can be valid under two branches of a `oneOf`, so that it is equivalent to an `anyOf`.

    Args:
        root: the whole schema.
        branches: the schemas of the `oneOf`.
        path: location of the `oneOf`.
        enforcement: records the keyword if the check fails.

    Raises:
        GrammarError: a value may be valid under two branches, or the check takes too long, and the schema is strict.
    """
    try:
        found = _overlap(root, branches)
    except NotEnforcedError as error:  # a reference cannot be enforced, or there are too many comparisons
        enforcement.leave_out(path, f"not enforced: {error}; use anyOf")
        return
    if found is not None:
        enforcement.leave_out(path, f"not enforced: a value might match both [{found[0]}] and [{found[1]}]; use anyOf")


def _overlap(root: Any, branches: list[Any]) -> tuple[int, int] | None:
    """Return two branches that may have a value in common; None if there are none."""
    owner: dict[str, int] = {}
    others: list[int] = []
    for i, branch in enumerate(branches):
        schema = _without_refs(root, branch)
        values = _values(schema) if isinstance(schema, dict) else None
        if values is None:
            others.append(i)
            continue
        for value in values:
            if value in owner:
                return owner[value], i
            owner[value] = i
    rest = set(others)
    comparison = _Comparison(root)
    pairs = ((i, j) for i in others for j in range(len(branches)) if j not in rest or j < i)
    for num, (i, j) in enumerate(pairs):
        if num == _MAX_PAIRS:
            raise NotEnforcedError(f"there are more than {_MAX_PAIRS} pairs of branches to compare")
        if not comparison.are_disjoint(branches[i], branches[j]):
            return min(i, j), max(i, j)
    return None


class _Comparison:
    """Compares pairs of schemas.

    Args:
        root: the whole schema.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether types, values or a required property prove that no value is valid under both schemas.

        Raises:
            NotEnforcedError: the comparison takes too long.
        """
        one, other = _without_refs(self._root, one), _without_refs(self._root, other)
        if not isinstance(one, dict) or not isinstance(other, dict) or one is other or depth > 4:
            return False
        self._steps += 1 + _size(one) + _size(other)
        if self._steps > _MAX_STEPS:
            raise NotEnforcedError("comparing the branches takes too long")
        values, other_values = _values(one), _values(other)
        if values is not None and other_values is not None:
            return values.isdisjoint(other_values)
        types, other_types = _types(one), _types(other)
        if types is None or other_types is None:
            return False
        if types.isdisjoint(other_types):
            return True
        if not types == other_types == {"object"}:
            return False
        names = _always_there(one) & _always_there(other)
        return any(self.are_disjoint(one["properties"][name], other["properties"][name], depth + 1) for name in names)


def types_of(root: Any, schema: Any) -> set[str] | None:
    """Return the types that a schema allows, with `number` in place of `integer`; None if the schema names no types."""
    schema = _without_refs(root, schema)
    return _types(schema) if isinstance(schema, dict) else None


def _without_refs(root: Any, schema: Any) -> Any:
    for _ in range(16):
        if isinstance(schema, dict) and "$ref" in schema:
            schema = resolve(root, schema["$ref"], "$ref")
        elif isinstance(schema, dict) and isinstance(schema.get("allOf"), list) and len(schema["allOf"]) == 1:
            schema = schema["allOf"][0]
        else:
            return schema
    return None


def _size(schema: Mapping[str, Any]) -> int:
    """Return the number of values and names that a comparison visits."""
    return sum(len(schema[key]) for key in ("enum", "required") if isinstance(schema.get(key), list))


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the values that `const` or `enum` allow, in a canonical text form; None if the schema has neither."""
    values = schema.get("enum") if "const" not in schema else [schema["const"]]
    return None if not isinstance(values, list) else {_text(value) for value in values}


def _text(value: Any) -> str:
    if json_type(value) == "integer":
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{_text(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    if "const" in schema:
        names = [json_type(schema["const"])]
    elif isinstance(schema.get("enum"), list):
        names = [json_type(value) for value in schema["enum"]]
    else:
        wanted = schema.get("type")
        names = [wanted] if isinstance(wanted, str) else wanted or []
    return {"number" if name == "integer" else name for name in names} or None


def _always_there(schema: Mapping[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(schema.get("required", ())) & set(properties) if isinstance(properties, dict) else set()
