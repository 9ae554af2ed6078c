"""The tools of a chat request, as clients send them."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from graftlm.server.wire import Text

__all__ = ["ChosenTools", "ToolChoiceField", "ToolRequest", "ToolsField"]

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FunctionRequest(_Body):
    """A function that the model may call."""

    name: _Name
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="The JSON schema of the function's parameters, which are an object. Null: the function has no "
        "parameters.",
    )
    strict: bool | None = Field(
        default=None,
        description="Refuse a schema that cannot be enforced in full. If false, the parts that cannot be enforced "
        "are ignored. Null: the request's `strict`; if this is also null, false.",
    )


class ToolRequest(_Body):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: FunctionRequest


class ChosenFunction(_Body):
    """The name of a function."""

    name: _Name


class ChosenTool(_Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(_Body):
    """A subset of the tools, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = Field(min_length=1, max_length=128)


class ChosenTools(_Body):
    """A `tool_choice` that limits calls to some tools. The prompt still describes all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "as_text"
    return "as_some" if value.get("type") == "allowed_tools" else "as_object"


ToolsField: TypeAlias = Annotated[list[ToolRequest], Field(max_length=128)]
ToolChoiceField: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("as_text")]
    | Annotated[ChosenTool, Tag("as_object")]
    | Annotated[ChosenTools, Tag("as_some")],
    Discriminator(_kind),
]
