"""The routes /parse_function_call and /separate_reasoning, which apply the server's chat formats to a text."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from graftlm.contracts import ContentDelta, ReasoningDelta, Tool, ToolCallDelta
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES, ApiError
from graftlm.server.openai.tool_requests import ToolRequest
from graftlm.server.wire import Text, WireModel

__all__ = ["make_router"]

#: SGLang's name of a parser -> graftlm's name of the format.
_TOOL_CALLS: Final[Mapping[str, str]] = {
    "llama3": "llama3_json",
    "qwen": "hermes",
    "qwen25": "hermes",
}
_REASONING: Final[Mapping[str, str]] = {
    "deepseek-r1": "think",
    "deepseek-v3": "think",
    "glm45": "think",
    "qwen3": "think",
    "qwen3-thinking": "think",
}
#: The parameters of a tool that specifies none.
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}


class ParseCallsRequest(WireModel):
    """A text that is parsed for tool calls."""

    known_at: ClassVar[str | None] = "/parse_function_call"

    text: Text = Field(description="A model's output.")
    tools: Annotated[list[ToolRequest], Field(max_length=128)] = Field(
        description="The functions that the model may call."
    )
    tool_call_parser: Text | None = Field(
        default=None,
        description="The format of the tool calls. It must be the server's format (`chat.tool_call_format`), under "
        "this name or SGLang's name. Null: the server's format.",
    )


class SeparateRequest(WireModel):
    """A text that is divided into reasoning and the rest."""

    known_at: ClassVar[str | None] = "/separate_reasoning"

    text: Text = Field(description="A model's output.")
    reasoning_parser: Text | None = Field(
        default=None,
        description="The format of the reasoning. It must be the server's format (`chat.reasoning_format`), under "
        "this name or SGLang's name. Null: the server's format.",
    )


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ParsedCall(_Body):
    """A tool call. Its parameters are the text of a JSON object."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(_Body):
    """The tool calls in a text, and the text without them."""

    normal_text: str
    calls: list[ParsedCall]


class Separated(_Body):
    """The reasoning in a text, and the text without it."""

    reasoning_text: str
    text: str


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module."""
    router = APIRouter(tags=["information"], responses={400: ERROR_RESPONSES[400]})

    @router.post("/parse_function_call", summary="Parse the tool calls in a text")
    async def parse_function_call(body: ParseCallsRequest) -> ParsedCalls:
        _check_format(manager, "tool_calls", body.tool_call_parser, _TOOL_CALLS, "tool_call_parser")
        return _calls(manager, body)

    @router.post("/separate_reasoning", summary="Divide a text into reasoning and content")
    async def separate_reasoning(body: SeparateRequest) -> Separated:
        _check_format(manager, "reasoning", body.reasoning_parser, _REASONING, "reasoning_parser")
        return _separated(manager, body.text)

    return router


def _check_format(
    manager: TokenizerManager, family: str, wanted: str | None, names: Mapping[str, str], param: str
) -> None:
    """Refuse a format name that is not the server's format, or any request if the server has no format.

    Raises:
        ApiError: 400, the format is not the server's, or no format is configured.
    """
    own = manager.model.resolved.get(family, {}).get("name")
    if own is None:
        raise ApiError(
            400, f"this server does not parse {family.replace('_', ' ')}: no format is configured", param=param
        )
    if wanted and names.get(wanted, wanted) != own:
        raise ApiError(400, f"{param}: this server parses the format {own!r}, got {wanted!r}", param=param)


def _calls(manager: TokenizerManager, body: ParseCallsRequest) -> ParsedCalls:
    call_format = manager.chat_formats.tool_calls
    assert call_format is not None
    functions = [tool.function for tool in body.tools]
    tools = [
        Tool(it.name, it.description or "", it.parameters or dict(_NO_PARAMETERS), strict=bool(it.strict))
        for it in functions
    ]
    parser = call_format.parser(tools, enforced=False)
    text, calls = "", list[ParsedCall]()
    for delta in [*parser.push(body.text), *parser.finish()]:
        match delta:
            case ContentDelta(more):
                text += more
            case ToolCallDelta(_, str(name), arguments):
                index = next((i for i, it in enumerate(functions) if it.name == name), -1)
                calls.append(ParsedCall(tool_index=index, name=name, parameters=arguments))
            case ToolCallDelta(index, _, arguments):
                calls[index].parameters += arguments
    return ParsedCalls(normal_text=text, calls=calls)


def _separated(manager: TokenizerManager, text: str) -> Separated:
    reasoning_format = manager.chat_formats.reasoning
    assert reasoning_format is not None
    # If the prompt opened the reasoning, the output contains only the end tag.
    begin, end = reasoning_format.begin, reasoning_format.end
    is_open = bool(begin) and begin not in text and bool(end) and end in text
    parser = reasoning_format.parser(is_open=is_open)
    deltas = [*parser.push(text), *parser.finish()]
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return Separated(
        reasoning_text=reasoning, text="".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    )
