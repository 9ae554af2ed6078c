"""Fields of completions and chats that have other names in other servers."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import PydanticCustomError

from graftlm.server.errors import FOREIGN_FIELD

__all__ = ["with_own_names"]

#: Another server's field -> graftlm's field with the same meaning. The first two are SGLang's fields, the others are
#: vLLM's fields.
_OWN_NAMES: Final[Mapping[str, str]] = {
    "rid": "request_id",
    "no_stop_trim": "include_stop_str_in_output",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "guided_decoding_backend": "grammar_backend",
}

#: A value of vLLM's `guided_decoding_backend` -> graftlm's grammar backend; None: the engine's backend.
_BACKENDS: Final[Mapping[str, str | None]] = {
    "auto": None,
    "guidance": "llguidance",
    "outlines": "outlines",
    "xgrammar": "xgrammar",
}

#: A field of vLLM's `structured_outputs` -> graftlm's field.
_STRUCTURED: Final[Mapping[str, str]] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}

#: Fields of `structured_outputs` that are accepted only with the value null or false.
_STRUCTURED_DEFAULTS: Final = (
    "disable_additional_properties",
    "disable_any_whitespace",
    "disable_fallback",
    "whitespace_pattern",
)


def with_own_names(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request in which the names of other servers are replaced by graftlm's names.

    Raises:
        PydanticCustomError: of type FOREIGN_FIELD; two fields with the same meaning have different values, or a field
            of `structured_outputs` or a backend is not supported.
    """
    structured = body.get("structured_outputs")
    if not structured and not any(name in body for name in _OWN_NAMES):
        return body
    renamed = {name: body[name] for name in _OWN_NAMES if body.get(name) is not None}
    fields = {name: value for name, value in body.items() if name not in _OWN_NAMES}
    for name, value in renamed.items():
        if name == "guided_decoding_backend":
            value = _own_backend(value)
        if value is not None:
            _set(fields, _OWN_NAMES[name], value, name)
    if isinstance(structured, Mapping) and structured:
        del fields["structured_outputs"]
        for name, value in structured.items():
            _set_structured(fields, str(name), value)
    return fields


def _own_backend(value: Any) -> str | None:
    """Return graftlm's grammar backend for a value of `guided_decoding_backend`.

    Raises:
        PydanticCustomError: graftlm has no such backend.
    """
    if value == "":
        return None
    if not isinstance(value, str) or value not in _BACKENDS:
        context = {"name": "guided_decoding_backend", "known": ", ".join(_BACKENDS)}
        raise PydanticCustomError(FOREIGN_FIELD, "not a supported backend; known: {known}", context)
    return _BACKENDS[value]


def _set_structured(fields: dict[str, Any], name: str, value: Any) -> None:
    where = f"structured_outputs.{name}"
    if value is None or (value is False and name not in _STRUCTURED):
        return
    if name == "json_object" and value is True:
        _set(fields, "json_schema", {"type": "object"}, where)
    elif name in _STRUCTURED:
        _set(fields, _STRUCTURED[name], value, where)
    elif name in _STRUCTURED_DEFAULTS:
        raise PydanticCustomError(
            FOREIGN_FIELD, "is a field of vLLM and is not supported by this server; leave it out", {"name": where}
        )
    else:
        known = ", ".join((*_STRUCTURED, "json_object", *_STRUCTURED_DEFAULTS))
        raise PydanticCustomError(
            FOREIGN_FIELD,
            "is not a field of structured_outputs; known fields: {known}",
            {"name": where, "known": known},
        )


def _set(fields: dict[str, Any], own: str, value: Any, where: str) -> None:
    """Set the field `own` of graftlm; `where` names the other server's field.

    Raises:
        PydanticCustomError: the field already has another value.
    """
    given = fields.get(own)
    if given is not None and given is not False and given != value:
        context = {"name": where, "own": own}
        raise PydanticCustomError(
            FOREIGN_FIELD, "means the same as {own}, which has another value; leave one of them out", context
        )
    fields[own] = value
