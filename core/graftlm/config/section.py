"""The base class of configuration sections, and the types of their fields."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = ["Float", "Int", "Name", "NaturalInt", "Options", "PositiveFloat", "PositiveInt", "Section", "refuse_bool"]


class Section(BaseModel):
    """A mapping of known keys. Unknown keys are errors. Values are immutable. Null means all defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    #: The field that a plain string sets. `cache: radix` means `cache: {name: radix}`.
    shorthand: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _accept_shorthand(cls, value: Any) -> Any:
        return cls.written_out(value)

    @classmethod
    def written_out(cls, value: Any) -> Any:
        """Return the mapping for a string or null. Other values are returned unchanged."""
        if value is None:
            return {}
        if isinstance(value, str) and cls.shorthand is not None:
            return {cls.shorthand: value}
        return value


def refuse_bool(value: Any) -> Any:
    """Refuse a boolean. True is an int in Python, but `page_size: yes` must be an error."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Int = Annotated[int, BeforeValidator(refuse_bool)]
Float = Annotated[float, BeforeValidator(refuse_bool)]
PositiveFloat = Annotated[float, Field(gt=0), BeforeValidator(refuse_bool)]
NaturalInt = Annotated[int, Field(ge=0), BeforeValidator(refuse_bool)]
PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(refuse_bool)]
Name = Annotated[str, Field(min_length=1)]
Options = Annotated[
    dict[str, Any], Field(description="Options of the selected provider; `graftlm config schema` lists them.")
]
