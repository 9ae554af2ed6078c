"""Reads and validates structural tags: free text with constrained parts."""

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from graftlm.errors import GrammarError

__all__ = ["StructuralTag", "Structure", "parse_structural_tag"]

_KEYS: Final = {"type", "triggers", "structures", "at_least_one", "stop_after_first"}
_STRUCTURE_KEYS: Final = {"begin", "schema", "regex", "end"}
_MAX_STRUCTURES: Final = 256


@dataclass(frozen=True, slots=True)
class Structure:
    """A constrained part of a structural tag. Exactly one of `schema` and `regex` is not None.

    Attributes:
        begin: the text before the part; it starts with a trigger.
        schema: a JSON schema, as text.
        regex: a regular expression.
        end: the text after the part.
        path: location of the structure in the tag, such as `$.structures[0]`.
    """

    begin: str
    schema: str | None
    regex: str | None
    end: str
    path: str


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """Free text in which each trigger starts a structure.

    Attributes:
        triggers: texts, none of which contains another; each structure starts with exactly one of them.
        structures: the constrained parts.
        at_least_one: whether the output must start with a structure.
        stop_after_first: whether the output ends after the first structure.
    """

    triggers: tuple[str, ...]
    structures: tuple[Structure, ...]
    at_least_one: bool
    stop_after_first: bool


def parse_structural_tag(text: str) -> StructuralTag:
    """Parse a structural tag; see `GrammarKind.STRUCTURAL_TAG` for its format.

    Schemas and regular expressions are not checked. A null value is treated as absent.

    Raises:
        GrammarError: the tag is malformed; the message names the path.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"structural_tag: not JSON: {error}") from None
    if not isinstance(tag, dict):
        _refuse("$", "expected an object", tag)
    _check_keys(tag, _KEYS, "$")
    if tag.get("type") not in (None, "structural_tag"):
        _refuse("$.type", "expected structural_tag", tag["type"])
    triggers = _triggers(tag.get("triggers"))
    structures = tag.get("structures")
    if not isinstance(structures, list) or not 1 <= len(structures) <= _MAX_STRUCTURES:
        _refuse("$.structures", f"expected a list of 1 to {_MAX_STRUCTURES} structures", structures)
    parts = tuple(_structure(one, f"$.structures[{i}]", triggers) for i, one in enumerate(structures))
    return StructuralTag(
        triggers=triggers,
        structures=parts,
        at_least_one=_flag(tag, "at_least_one"),
        stop_after_first=_flag(tag, "stop_after_first"),
    )


def _triggers(triggers: Any) -> tuple[str, ...]:
    if not isinstance(triggers, list) or not 1 <= len(triggers) <= _MAX_STRUCTURES:
        _refuse("$.triggers", f"expected a list of 1 to {_MAX_STRUCTURES} texts", triggers)
    unique = tuple(dict.fromkeys(_text(one, f"$.triggers[{i}]") for i, one in enumerate(triggers)))
    for one in unique:
        for other in unique:
            if one != other and one in other:
                raise GrammarError(
                    f"structural_tag: $.triggers: {other!r} contains {one!r}, so it would never be reached; list only "
                    f"{one!r}"
                )
    return unique


def _structure(structure: Any, path: str, triggers: tuple[str, ...]) -> Structure:
    if not isinstance(structure, dict):
        _refuse(path, "expected an object with begin, schema (or regex) and end", structure)
    _check_keys(structure, _STRUCTURE_KEYS, path)
    for key, hint in (("begin", "write the text before it"), ("end", 'write "" for none')):
        if structure.get(key) is None:
            raise GrammarError(f"structural_tag: {path}.{key} is missing; {hint}")
    begin = _text(structure["begin"], f"{path}.begin")
    if not begin.startswith(triggers):
        _refuse(f"{path}.begin", f"expected a text that starts with one of the triggers, {json.dumps(triggers)}", begin)
    schema, regex = structure.get("schema"), structure.get("regex")
    if (schema is None) == (regex is None):
        raise GrammarError(f"structural_tag: {path}: expected one of schema and regex")
    if regex is not None and not isinstance(regex, str):
        _refuse(f"{path}.regex", "expected a regular expression", regex)
    schema = None if schema is None else json.dumps(schema)
    end = structure["end"]
    return Structure(begin, schema, regex, _text(end, f"{path}.end") if end != "" else "", path)


def _text(text: Any, path: str) -> str:
    if not isinstance(text, str) or not text:
        _refuse(path, "expected a non-empty string", text)
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text):
        _refuse(path, "null characters and unpaired surrogates are not allowed", text)
    return text


def _flag(tag: dict[str, Any], key: str) -> bool:
    value = tag.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        _refuse(f"$.{key}", "expected true or false", value)
    return value


def _check_keys(value: dict[str, Any], known: set[str], path: str) -> None:
    for key in value:
        if key not in known:
            raise GrammarError(f"structural_tag: {path}.{key}: unknown key, expected one of {', '.join(sorted(known))}")


def _refuse(path: str, message: str, got: object) -> NoReturn:
    raise GrammarError(f"structural_tag: {path}: {message}, got {json.dumps(got)[:80]}")
