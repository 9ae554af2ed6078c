"""The tools of a chat request: the permitted tools, their enforced schemas, and their description in the prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from graftlm.chat.chat_formats import ChatFormats
from graftlm.contracts import CallGrammar, Tool, ToolCall, ToolCallFormat, ToolChoice
from graftlm.errors import GrammarError
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ApiError
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.tool_requests import ChosenTools, ToolRequest
from graftlm.types import Message, SamplingParams

__all__ = ["ToolUse", "check_tools", "for_template", "tool_use"]

#: A minimal structural tag, to check whether a grammar backend supports structural tags.
_PROBE: Final = {
    "triggers": ["<a>"],
    "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
    "at_least_one": False,
    "stop_after_first": False,
}

#: The parameters of a tool that specifies none.
_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, and the format of the calls.

    Attributes:
        format: the format in which the model writes calls.
        tools: the tools, at least one.
        indices: the index of each tool among the tools of the request.
        choice: whether a tool has to be called.
        parallel: whether an answer may contain more than one call.
    """

    format: ToolCallFormat
    tools: tuple[Tool, ...]
    indices: tuple[int, ...]
    choice: ToolChoice
    parallel: bool

    @property
    def is_strict(self) -> bool:
        """Whether any tool is strict. The schema of a strict tool is refused if it cannot be enforced."""
        return any(tool.strict for tool in self.tools)

    def grammar(self) -> CallGrammar | None:
        """Return the grammar that enforces the format of calls; None if the format cannot be enforced.

        Raises:
            ApiError: 400, the format cannot enforce a strict tool's schema.
        """
        try:
            return self.format.grammar(self.tools, self.choice, parallel=self.parallel)
        except GrammarError as error:
            raise ApiError(400, str(error), param="tools", code="invalid_schema") from error

    def unenforced(self, grammar: CallGrammar, paths: Sequence[str]) -> tuple[str, ...]:
        """Return the parts of the schemas that are not enforced.

        Args:
            grammar: the result of `grammar`.
            paths: the parts of `grammar` that a grammar backend does not enforce.

        Returns: their paths in the request, such as `tools[0].function.parameters.properties.a.minimum`.

        Raises:
            ApiError: 400, the schema of a strict tool can be enforced separately, but not in a grammar for all tools.
        """
        names = []
        for i, path in grammar.left_out(paths):
            name = f"tools[{self.indices[i]}].function.parameters{path.removeprefix('$')}"
            if self.tools[i].strict:
                message = (
                    f"{name}: no grammar backend can enforce this part of a strict tool together with tools that are "
                    "not strict; make all tools strict"
                )
                param = f"tools.{self.indices[i]}.function.parameters"
                raise ApiError(400, message, param=param, code="invalid_schema")
            names.append(name)
        return tuple(names)


def tool_use(body: ChatRequest, formats: ChatFormats) -> ToolUse | None:
    """Return the tools that the answer to a request may call; None if it cannot call any.

    Raises:
        ApiError: 400, `tool_choice` names a tool that the request does not have, two tools have the same name, or the
            server has no plugin for tool calls.
    """
    choice, given = body.tool_choice, body.tools or []
    _check_names(given)
    if not given and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice is only allowed when tools are given", param="tool_choice")
    if not given or choice == "none":
        return None
    if formats.tool_calls is None:
        raise ApiError(400, "this server has no plugin for tool calls", param="tools", code="unsupported")
    tools = tuple(_tool(tool, strict=bool(body.strict)) for tool in given)
    parallel = body.parallel_tool_calls is not False
    if choice is None or isinstance(choice, str):
        mode = ToolChoice.REQUIRED if choice == "required" else ToolChoice.AUTO
        return ToolUse(formats.tool_calls, tools, tuple(range(len(tools))), mode, parallel)
    if isinstance(choice, ChosenTools):
        allowed = choice.allowed_tools
        indices = [
            _index_of(tools, tool.function.name, f"tool_choice.allowed_tools.tools.{i}.function.name")
            for i, tool in enumerate(allowed.tools)
        ]
        kept = tuple(sorted(set(indices)))
        return ToolUse(formats.tool_calls, tuple(tools[i] for i in kept), kept, ToolChoice(allowed.mode), parallel)
    index = _index_of(tools, choice.function.name, "tool_choice.function.name")
    return ToolUse(formats.tool_calls, (tools[index],), (index,), ToolChoice.REQUIRED, parallel=False)


def _index_of(tools: Sequence[Tool], name: str, where: str) -> int:
    index = next((i for i, tool in enumerate(tools) if tool.name == name), None)
    if index is None:
        names = ", ".join(tool.name for tool in tools)
        raise ApiError(400, f"tool_choice: there is no tool {name!r}; tools: {names}", param=where)
    return index


async def check_tools(use: ToolUse, body: ChatRequest, manager: TokenizerManager) -> bool:
    """Check the schema of each tool separately, so that an error names the tool.

    Returns: whether the format of calls is enforced. If no grammar backend supports structural tags, the format is not
        enforced, and calls are only parsed. This is accepted only if no call is required and no tool is strict.

    Raises:
        ApiError: 400, a schema is malformed, or the schema of a strict tool cannot be enforced.
    """
    backend = body.grammar_backend
    can_tag = await manager.preparer.enforces(SamplingParams(structural_tag=_PROBE, grammar_backend=backend))
    if use.choice is ToolChoice.AUTO and not use.is_strict and not can_tag:
        return False
    for index, tool in zip(use.indices, use.tools, strict=True):
        where = f"tools.{index}.function.parameters"
        schema = json.dumps(tool.parameters)
        params = SamplingParams(json_schema=schema, strict=tool.strict, grammar_backend=backend)
        try:
            await manager.preparer.check_params(params)
        except GrammarError as error:
            raise ApiError(400, f"{where}: {error}", param=where, code="invalid_schema") from error
    return True


def for_template(
    messages: Sequence[Message], body: ChatRequest, formats: ChatFormats
) -> tuple[list[Message], dict[str, Any]]:
    """Return the conversation, and the variables of the chat template that describe the tools.

    A template that supports tools gets the arguments of calls as objects. For other templates, the calls and the
    descriptions of the tools are written into the messages as text.
    """
    tools = body.tools or []
    if formats.template_knows_tools or formats.tool_calls is None:
        listed = [tool.model_dump(exclude_none=True) for tool in tools]
        return [_with_objects(message) for message in messages], ({"tools": listed} if listed else {})
    written = [_as_text(message, formats.tool_calls) for message in messages]
    if tools and body.tool_choice != "none":
        written = _instructed(written, formats.tool_calls.instructions([_tool(tool) for tool in tools]))
    return written, {}


def _check_names(tools: Sequence[ToolRequest]) -> None:
    names = [tool.function.name for tool in tools]
    for i, (name, tool) in enumerate(zip(names, tools, strict=True)):
        where = f"tools.{i}.function"
        if name in names[:i]:
            raise ApiError(400, f"{where}.name: {name!r} is given twice", param=f"{where}.name")
        schema = tool.function.parameters or _NO_PARAMETERS
        kind = schema.get("type", "object" if "properties" in schema else None)
        if kind != "object":
            message = f'{where}.parameters: the schema must have "type": "object", got {json.dumps(kind)[:80]}'
            raise ApiError(400, message, param=f"{where}.parameters.type", code="invalid_schema")


def _tool(tool: ToolRequest, *, strict: bool = False) -> Tool:
    """Return a tool. The argument `strict` is used if the request does not set the tool's `strict`."""
    function = tool.function
    schema = function.parameters or _NO_PARAMETERS
    is_strict = strict if function.strict is None else function.strict
    return Tool(function.name, function.description or "", schema, strict=is_strict)


def _functions(message: Message) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [call["function"] for call in calls if isinstance(call.get("function"), Mapping)]


def _with_objects(message: Message) -> Message:
    """Return a copy of a message in which the arguments of calls are objects instead of text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
        if isinstance(call.get("function"), Mapping)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": changed}


def _arguments(function: Mapping[str, Any]) -> Any:
    """Return a call's arguments as an object.

    Arguments that are not the text of an object are returned unchanged. Null becomes {}.
    """
    given = function.get("arguments")
    if given is None:
        return {}
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _as_text(message: Message, format_: ToolCallFormat) -> Message:
    """Return a copy of a message in which its calls are part of the content, in the model's format."""
    calls = []
    for function in _functions(message):
        arguments = _arguments(function)
        text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else "{}"
        calls.append(ToolCall(str(function.get("name")), text))
    if not calls:
        return message
    parts = [message.get("content") or "", format_.render(calls)]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(part for part in parts if part)}


def _instructed(messages: list[Message], instructions: str) -> list[Message]:
    """Append instructions to the system message, or add a system message if there is none."""
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]
