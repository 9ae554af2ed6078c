"""Whether two JSON schemas can have a value in common."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from graftlm.errors import GrammarError
from graftlm_grammar.enforcement import Enforcement, NotEnforcedError

__all__ = ["check_disjoint", "json_type", "resolve", "types_of"]

_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")
_MAX_PAIRS: Final = 4096
_MAX_STEPS: Final = 400_000  # schemas looked at, their values and names of properties; about a second


def json_type(value: Any) -> str:
    """Return the name that JSON Schema has for a value's type."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def resolve(root: Any, ref: Any, path: str) -> Any:
    """Return what a `$ref` refers to.

    Raises:
        NotEnforcedError: it is not of the form "#/name/name".
        GrammarError: it leads nowhere.
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
            raise GrammarError(f"{path}: {ref[:80]} leads nowhere")
    return schema


def check_disjoint(root: Any, branches: list[Any], path: str, enforcement: Enforcement) -> None:
    """Check that surely no value is valid under two branches of a `oneOf`: then it is an `anyOf`.

    Args:
        root: what references refer to.
        path: where the branches stand.

    Raises:
        GrammarError: it is not sure, and the schema is strict.
    """
    try:
        found = _overlap(root, branches)
    except NotEnforcedError as error:  # a reference that was left out before
        enforcement.leave_out(path, f"not enforced: {error}; use anyOf")
        return
    if found is not None:
        enforcement.leave_out(path, f"not enforced: a value might match both [{found[0]}] and [{found[1]}]; use anyOf")


def _overlap(root: Any, branches: list[Any]) -> tuple[int, int] | None:
    """Return two branches that a value might match, None if surely none does."""
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
            raise NotEnforcedError(f"more than {_MAX_PAIRS} pairs of branches are not compared")
        if not comparison.are_disjoint(branches[i], branches[j]):
            return min(i, j), max(i, j)
    return None


class _Comparison:
    """Tells of pairs of schemas whether surely no value is valid under both.

    Args:
        root: what references refer to.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0

    def are_disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Tell it by type, by value, or by a property that differs.

        Raises:
            NotEnforcedError: this takes too long.
        """
        one, other = _without_refs(self._root, one), _without_refs(self._root, other)
        if not isinstance(one, dict) or not isinstance(other, dict) or one is other or depth > 4:
            return False
        self._steps += 1 + _size(one) + _size(other)
        if self._steps > _MAX_STEPS:
            raise NotEnforcedError("to compare the branches takes too long")
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
    """Return the types that a schema says it allows, integers counted as numbers; None if it does not say."""
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
    """Return how many values and names a comparison goes through."""
    return sum(len(schema[key]) for key in ("enum", "required") if isinstance(schema.get(key), list))


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the only values that a schema allows, as texts that are equal where the values are."""
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
