"""The types of fields in request models, with their validation."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from graftlm.config.problems import nearest
from graftlm.server.errors import UNKNOWN_FIELD
from graftlm.server.known_fields import is_empty, without_defaults, without_empty
from graftlm.types import TokenIds

__all__ = [
    "MAX_PROMPTS",
    "NUMBER",
    "UNICODE",
    "WHOLE",
    "LogitsProcessors",
    "OneOrMany",
    "OneOrManyPrompts",
    "PromptIds",
    "ReasoningBegin",
    "ReasoningEnd",
    "SchemaField",
    "Text",
    "TextOrObject",
    "TokenIdList",
    "Unsupported",
    "WireModel",
    "one_or_many",
]

T = TypeVar("T")

#: Maximum number of prompts in one call.
MAX_PROMPTS = 4096


class WireModel(BaseModel):
    """A JSON object of known fields, each with its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    #: Path for `known_fields`. Fields that other servers have at this path are accepted if they have their default
    #: value. If the path is None, such fields are refused.
    known_at: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        if cls.known_at is not None and isinstance(value, Mapping):
            value = without_defaults(without_empty(value), cls.model_fields, cls.known_at)
        unknown = [key for key in value if key not in cls.model_fields] if isinstance(value, Mapping) else []
        if unknown:
            context = {"text": _unknown_message(unknown[0], cls), "name": unknown[0]}
            raise PydanticCustomError(UNKNOWN_FIELD, "{text}", context)
        return value

    def given(self) -> dict[str, Any]:
        """Return the fields that the client set, except those set to null, which means the default."""
        return {name: getattr(self, name) for name in self.model_fields_set if getattr(self, name) is not None}


def _unknown_message(name: str, model: type[BaseModel]) -> str:
    supported = [key for key, field in model.model_fields.items() if field.annotation is not type(None)]
    close = nearest(name, supported)
    hint = f"did you mean '{close}'?" if close else f"known fields: {', '.join(supported)}"
    return f"unknown field {name[:60]!r}; {hint}"


def _refuse(value: Any) -> None:
    if not is_empty(value):
        raise PydanticCustomError("unsupported_field", "is not supported by this server; leave it out")


def _to_whole(value: Any) -> Any:
    # JSON has only one type of number, and some clients write 16 as 16.0.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_float(value: Any) -> Any:
    # An int that is too large for a float becomes infinite. The field's bounds then refuse it with a clear message.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**63:
        return float("inf") if value > 0 else float("-inf")
    return value


def _check_unicode(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("not_unicode", "must be Unicode text, got half of a surrogate pair") from None
    return value


#: A field of the API that is not supported. Empty values are accepted, since some clients send every field.
Unsupported: TypeAlias = Annotated[
    None, BeforeValidator(_refuse), Field(description="Not supported. The field must be absent, null, false or empty.")
]

#: Must be the last annotation, as in `Annotated[int, Field(ge=0), WHOLE]`. Otherwise the OpenAPI document lacks the
#: bounds.
WHOLE: Final = BeforeValidator(_to_whole)
NUMBER: Final = BeforeValidator(_to_float)

#: Refuses half of a surrogate pair, which JSON can contain but UTF-8 cannot encode.
UNICODE: Final = AfterValidator(_check_unicode)
Text: TypeAlias = Annotated[str, UNICODE]

#: The types that options of logits processors may have. Messages between processes can contain all of these types.
_Scalar: TypeAlias = (
    bool | Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | Annotated[float, Field(allow_inf_nan=False)] | Text | None
)
LogitsProcessors: TypeAlias = Annotated[
    dict[Text, dict[Text, _Scalar | Annotated[list[_Scalar], Field(max_length=100_000)]]], Field(max_length=16)
]

# Validation stops at the first wrong element, because one error for each of a million elements would fill the memory.
TokenIdList: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]


class _AsArray:
    """Validates a value as `TokenIdList` and returns an array.

    For speed, NumPy checks the ids. pydantic validates only the lists that this check does not accept.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(_as_token_ids, handler.generate_schema(TokenIdList))


def _as_token_ids(value: Any, validate: core_schema.ValidatorFunctionWrapHandler) -> TokenIds:
    ids = _array_of(value) if isinstance(value, list) else None
    return np.array(validate(value), dtype=np.int32) if ids is None else ids


def _array_of(value: list[Any]) -> TokenIds | None:
    """Return token ids as int32 [n]; None if one of the ids is not valid or the list is empty."""
    if set(map(type, value)) != {int}:
        return None
    try:
        ids = np.array(value, dtype=np.int32)
    except OverflowError:
        return None
    return ids if ids.min() >= 0 else None


#: A prompt as token ids. It is a list in JSON, and int32 [n] in the model.
PromptIds: TypeAlias = Annotated[TokenIds, _AsArray()]


def one_or_many(value: Any) -> str:
    """Return the tag of the union member for a value: "many" for a list, else "one"."""
    return "many" if isinstance(value, list) else "one"


def _one_or_many_prompts(value: Any) -> str:
    """Return the tag for one or several prompts of token ids. The type of the first element determines it."""
    return "many" if isinstance(value, list) and value and isinstance(value[0], list) else "one"


def _text_or_object(value: Any) -> str:
    return "as_object" if isinstance(value, dict) else "as_flag" if isinstance(value, bool) else "as_text"


def _check_text_or_object(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise PydanticCustomError("text_or_object", "expected an object or its text, got {got}", {"got": _shown(value)})
    return value


def _check_schema(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict | bool):
        got = {"got": _shown(value)}
        raise PydanticCustomError("text_or_object", "expected an object, its text or true, got {got}", got)
    return value


def _shown(value: Any) -> str:
    return "a list" if isinstance(value, list) else json.dumps(value)[:80]


def _as_text(value: str | dict[str, Any] | bool) -> str | dict[str, Any]:
    return json.dumps(value) if isinstance(value, bool) else value


# A function selects the union member by the value's type. Errors then concern only this member.
OneOrMany: TypeAlias = Annotated[
    Annotated[T, Tag("one")] | Annotated[list[T], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many")],
    Discriminator(one_or_many),
]
TextOrObject: TypeAlias = Annotated[
    Annotated[Text, Tag("as_text")] | Annotated[dict[str, Any], Tag("as_object")],
    Discriminator(_text_or_object),
    BeforeValidator(_check_text_or_object),
]
ReasoningEnd: TypeAlias = Annotated[
    Text | None,
    Field(
        description="The text that ends the model's reasoning, such as </think>. The grammar applies to the output "
        "after this text."
    ),
]
ReasoningBegin: TypeAlias = Annotated[
    Text | None,
    Field(
        description="The token that begins the model's reasoning, such as <think>. If it is given, only an output "
        "that begins with this token contains reasoning. Null: the prompt has already begun the "
        "reasoning."
    ),
]
#: A JSON schema. `true` and `false` are also schemas; they are converted to text.
SchemaField: TypeAlias = Annotated[
    Annotated[Text, Tag("as_text")]
    | Annotated[dict[str, Any], Tag("as_object")]
    | Annotated[bool, AfterValidator(_as_text), Tag("as_flag")],
    Discriminator(_text_or_object),
    BeforeValidator(_check_schema),
]
OneOrManyPrompts: TypeAlias = Annotated[
    Annotated[PromptIds, Tag("one")]
    | Annotated[list[PromptIds], Field(fail_fast=True, max_length=MAX_PROMPTS), Tag("many")],
    Discriminator(_one_or_many_prompts),
]
