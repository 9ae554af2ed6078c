"""Finds the references in a JSON schema with definitions, and whether a finite value can match the schema."""

from collections.abc import Mapping
from typing import Any

from graftlm_grammar.schema_keywords import ENFORCED

__all__ = ["applied_in_place", "is_finite", "reachable", "without_endless"]


def applied_in_place(schema: Any) -> set[str]:
    """Return the names of the definitions that a schema applies to the value itself, not to a part of it."""
    if not isinstance(schema, dict):
        return set()
    if "$ref" in schema:
        return {schema["$ref"].removeprefix("#/$defs/")}
    return set[str]().union(*map(applied_in_place, [*schema.get("allOf", ()), *schema.get("anyOf", ())]))


def reachable(schema: Any, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of the definitions that a schema refers to, directly or indirectly."""
    found: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting.extend(one)
        elif isinstance(one, dict):
            name = str(one.get("$ref", "")).removeprefix("#/$defs/")
            if name in definitions and name not in found:
                found.add(name)
                waiting.append(definitions[name])
            waiting.extend(one.values())
    return found


def without_endless(schema: Any, finite: set[str]) -> Any:
    """Return a schema with `false` in place of each reference to a definition that no finite value matches.

    No finite value matches a definition that requires itself again without end. Objects of `schema` that are other
    references are not copied.

    Args:
        schema: the schema.
        finite: names of the definitions that a finite value can match.
    """
    if isinstance(schema, list):
        return [without_endless(one, finite) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if isinstance(schema.get("$ref"), str):  # otherwise `$ref` is the name of a property
        return schema if schema["$ref"].removeprefix("#/$defs/") in finite else False
    return {
        key: one if key == "enum" and isinstance(one, list) else without_endless(one, finite)
        for key, one in schema.items()
    }


def is_finite(schema: Any, finite: set[str]) -> bool:
    """Return whether a finite value can match a schema.

    Args:
        schema: the schema.
        finite: names of the definitions that a finite value can match.
    """
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"].removeprefix("#/$defs/") in finite
    if "anyOf" in schema:
        return any(is_finite(branch, finite) for branch in schema["anyOf"])
    if not all(is_finite(branch, finite) for branch in schema.get("allOf", ())):
        return False
    types = schema.get("type", list(ENFORCED))
    others = set(types) - {"object", "array"}
    return bool(others) or any(_has_finite(name, schema, finite) for name in types)


def _has_finite(name: str, schema: Mapping[str, Any], finite: set[str]) -> bool:
    if name == "object":
        named = schema.get("properties", {})
        return all(is_finite(named.get(key, True), finite) for key in schema.get("required", ()))
    least = schema.get("minItems", 0)
    first = schema.get("prefixItems", [])[:least]
    return all(is_finite(item, finite) for item in first) and (
        least <= len(first) or is_finite(schema.get("items", True), finite)
    )
