"""Conversion of pydantic's errors to messages with the key, the value and the nearest valid name."""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from graftlm.config.layers import KeyPath, Origin, Problem, dotted, origin_of

__all__ = ["nearest", "problems_in", "report"]

_MAX_GOT = 60

_PHRASES = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping of keys to values",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "missing": "is required",
    "model_attributes_type": "must be a mapping of keys to values",
    "model_type": "must be a mapping of keys to values",
    "none_required": "must be null",
    "string_type": "must be a string",
    "tuple_type": "must be a list",
    "value_error": "{error}",
}


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to a misspelled word; None if none is similar."""
    by_folded = {candidate.casefold(): candidate for candidate in candidates}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return by_folded[close[0]] if close else None


def report(problems: Iterable[Problem]) -> str:
    """Return the problems, one per line, in the order of the file's lines."""
    return "\n".join(dict.fromkeys(str(p) for p in sorted(problems, key=lambda p: p.origin.line)))


def problems_in(
    error: ValidationError,
    model: type[BaseModel],
    values: Mapping[str, Any],
    origins: Mapping[KeyPath, Origin],
    prefix: KeyPath = (),
) -> list[Problem]:
    """Convert pydantic's errors to problems.

    Args:
        error: the error of the validation, which contains all errors.
        model: the validated model, for the names of its fields.
        values: the raw values.
        origins: full path -> origin of the value.
        prefix: the path of `values` in the configuration.
    """
    problems = []
    for details in error.errors(include_url=False):
        # The error of a check of several fields has the path of the wrong field in its context.
        path = details.get("ctx", {}).get("path") or _real_path(details, values)
        full_path = (*prefix, *path)
        problems.append(Problem(full_path, _message(details, model, path, prefix), origin_of(full_path, origins)))
    return problems


def _real_path(details: ErrorDetails, values: Any) -> KeyPath:
    """Return an error's location without the names of union members that pydantic adds.

    The values do not contain these names.
    """
    path: list[str | int] = []
    for part in details["loc"]:
        inside = isinstance(values, Mapping | list | tuple)
        try:
            values = values[part] if inside else None
        except (KeyError, IndexError, TypeError):
            inside = False
        if inside:
            path.append(part)
    if details["type"] == "missing":
        path.append(details["loc"][-1])
    return tuple(path)


def _message(details: ErrorDetails, model: type[BaseModel], path: KeyPath, prefix: KeyPath) -> str:
    if details["type"] == "extra_forbidden":
        return _unknown_key(str(path[-1]), _fields_at(model, path[:-1]), model, prefix)
    context = details.get("ctx", {})
    message = details["msg"].replace("Input should be ", "must be ")
    if details["type"] in _PHRASES:
        message = _PHRASES[details["type"]].format(**context)
    elif details["type"] in ("string_too_short", "too_short") and context.get("min_length") == 1:
        message = "must not be empty"
    if details["type"] == "missing" or "path" in context:
        return message
    got = details["input"]
    message += f", got {_shown(got, _field_at(model, path))}"
    if details["type"] == "string_type" and isinstance(got, int | float):
        message += "; put it in quotes"
    if details["type"] == "literal_error":
        close = nearest(str(got), re.findall(r"'([^']*)'", context["expected"]))
        message += f"; did you mean '{close}'?" if close else ""
    return message


def _unknown_key(key: str, siblings: Mapping[str, FieldInfo], model: type[BaseModel], prefix: KeyPath) -> str:
    if close := nearest(key, siblings):
        return f"unknown key; did you mean '{close}'?"
    elsewhere = [path for path in _leaf_paths(model) if path[-1] == key]
    if len(elsewhere) == 1:
        return f"unknown key; did you mean '{dotted((*prefix, *elsewhere[0]))}'?"
    if not siblings:
        return "unknown key; no keys are allowed here"
    hint = "; a plugin's own options belong under `options`" if "options" in siblings else ""
    return f"unknown key; known keys: {', '.join(siblings)}{hint}"


def _shown(value: Any, field: FieldInfo | None) -> str:
    if field is not None and _holds_secret(field.annotation):
        return "a value that is not shown"
    text = repr(value)
    return text if len(text) <= _MAX_GOT else text[: _MAX_GOT - 3] + "..."


def _holds_secret(annotation: Any) -> bool:
    """Return whether a field of this type is or contains a secret."""
    fields = _fields_of(annotation).values()
    return SecretStr in _parts(annotation) or any(_holds_secret(field.annotation) for field in fields)


def _parts(annotation: Any) -> set[Any]:
    """Return all types in an annotation such as `Annotated[int, ...] | None`."""
    return {annotation}.union(*(_parts(part) for part in get_args(annotation)))


def _fields_of(annotation: Any) -> dict[str, FieldInfo]:
    models = [part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return {field.alias or name: field for model in models for name, field in model.model_fields.items()}


def _fields_at(model: type[BaseModel], path: KeyPath) -> dict[str, FieldInfo]:
    """Return the fields of the model at a path within `model`, by configuration key."""
    annotation: Any = model
    for part in path:
        field = _fields_of(annotation).get(str(part))
        # For an index or a key of a dict, the annotation does not change, because it contains the elements' type.
        annotation = annotation if field is None else field.annotation
    return _fields_of(annotation)


def _field_at(model: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    """Return the field at a path; for an element of a mapping or a list, the field that contains it."""
    found: FieldInfo | None = None
    annotation: Any = model
    for part in path:
        fields = _fields_of(annotation)
        if fields:
            found = fields.get(str(part))
            annotation = annotation if found is None else found.annotation
    return found


@functools.lru_cache(maxsize=64)
def _leaf_paths(model: type[BaseModel]) -> tuple[KeyPath, ...]:
    """Return the key path of every field of a model that is not itself a model."""
    paths: list[KeyPath] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths += [(name, *rest) for rest in _leaf_paths(field.annotation)]
        else:
            paths.append((name,))
    return tuple(paths)
