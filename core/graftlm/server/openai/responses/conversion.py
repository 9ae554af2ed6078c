"""Converts /v1/responses requests to chat requests."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.server.errors import ApiError
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.responses.requests import (
    AllowedToolsChoice,
    CallOutput,
    FunctionCall,
    FunctionChoice,
    FunctionTool,
    InputItem,
    MessageItem,
    OtherPart,
    OtherTool,
    PromptFields,
    ReasoningInput,
    ResponsesRequest,
    TextPart,
)
from graftlm.server.openai.translated import translated

__all__ = ["RESPONSES_NAMES", "chat_request"]

LOGPROBS: Final = "message.output_text.logprobs"

#: Part of a field's path in a chat request -> its name in /v1/responses.
RESPONSES_NAMES: Final[Mapping[str, str]] = {
    ".function.parameters": ".parameters",
    ".function.name": ".name",
    "allowed_tools.tools": "tools",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
}

#: Fields that have the same name and meaning in chat requests.
_SAME: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "stop",
    "seed",
    "stream",
    "logit_bias",
    "cache_salt",
    "prompt_cache_key",
    "priority",
    "timeout_s",
    "request_id",
)


def chat_request(body: PromptFields, items: Sequence[InputItem]) -> ChatRequest:
    """Return the chat request that generates a response.

    Args:
        items: the previous response's conversation, followed by the request's own input.

    Raises:
        ApiError: 400, the request uses a feature that graftlm does not support.
    """
    messages = _Conversation(body.instructions)
    for i, item in enumerate(items):
        messages.add(item, f"input.{i}")
    if not messages.list:
        raise ApiError(400, "input: the conversation is empty", param="input")
    fields: dict[str, Any] = {"messages": messages.list, "model": body.model} | _tools(body) | _format(body)
    fields |= _template(body)
    if isinstance(body, ResponsesRequest):
        fields |= {name: getattr(body, name) for name in _SAME}
        fields["max_completion_tokens"] = body.max_output_tokens
        if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return translated(fields)


def _template(body: PromptFields) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort == "none":
        variables = {"enable_thinking": False, "thinking": False} | variables
    fields: dict[str, Any] = {"chat_template_kwargs": variables} if variables else {}
    return fields if effort is None else fields | {"reasoning_effort": effort}


def _format(body: PromptFields) -> dict[str, Any]:
    wanted = None if body.text is None else body.text.format
    if wanted is None or wanted.type != "json_schema":
        return {} if wanted is None else {"response_format": {"type": wanted.type}}
    schema = {"name": wanted.name or "output", "schema": wanted.schema_, "strict": wanted.strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _tools(body: PromptFields) -> dict[str, Any]:
    fields: dict[str, Any] = {"parallel_tool_calls": body.parallel_tool_calls}
    if body.tools:
        fields["tools"] = [_tool(i, tool) for i, tool in enumerate(body.tools)]
    match body.tool_choice:
        case FunctionChoice() as choice:
            fields["tool_choice"] = _chosen(choice)
        case AllowedToolsChoice(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_chosen(tool) for tool in tools]}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        case choice:
            fields["tool_choice"] = choice
    return fields


def _chosen(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _tool(index: int, tool: FunctionTool | OtherTool) -> dict[str, Any]:
    if isinstance(tool, OtherTool):
        where = f"tools.{index}"
        raise ApiError(400, f"{where}: tools of type {tool.type!r} are not supported, only 'function'", param=where)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function | {"strict": tool.strict}}


class _Conversation:
    """Collects chat messages from items. The reasoning, text and calls of one answer become one message."""

    def __init__(self, instructions: str | None) -> None:
        self.list: list[dict[str, Any]] = []
        if instructions:
            self.list.append({"role": "system", "content": instructions})

    def add(self, item: InputItem, where: str) -> None:
        """Add an item; `where` is its path in the request, for errors."""
        match item:
            case MessageItem(role="assistant", content=content):
                self._answer("content", "tool_calls")["content"] = _text_of(content, f"{where}.content")
            case MessageItem(role=role, content=content):
                self._message("system" if role == "developer" else role, _content_of(content, f"{where}.content"))
            case ReasoningInput(content=content, summary=summary):
                text = _text_of(content or summary or "", f"{where}.content")
                self._answer("content", "tool_calls", "reasoning_content")["reasoning_content"] = text
            case FunctionCall(call_id=call_id, name=name, arguments=arguments):
                calls = self._answer().setdefault("tool_calls", [])
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case CallOutput(call_id=call_id, output=output):
                text = _text_of(output, f"{where}.output")
                self.list.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case _:
                raise ApiError(400, f"{where}: items of type {item.type!r} are not supported", param=where)

    def _message(self, role: str, text: str | list[dict[str, Any]]) -> None:
        """Append a message. System messages at the beginning are merged, because many templates allow only one."""
        if role == "system" and isinstance(text, str) and [message["role"] for message in self.list] == ["system"]:
            self.list[0]["content"] += f"\n\n{text}"
        else:
            self.list.append({"role": role, "content": text})

    def _answer(self, *absent: str) -> dict[str, Any]:
        """Return the last message if it is the assistant's and lacks the fields `absent`; else append a new message."""
        last = self.list[-1] if self.list else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in absent):
            last = {"role": "assistant", "content": ""}
            self.list.append(last)
        return last


def _content_of(content: str | Sequence[TextPart | OtherPart], where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: its text, or parts if it has pictures."""
    if isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return _text_of(content, where)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, OtherPart) and part.type == "input_image":
            url = (part.model_extra or {}).get("image_url")
            if not isinstance(url, str):
                place = f"{where}.{i}.image_url"
                raise ApiError(400, f"{place} must be a data URL or an http(s) URL", param=place)
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": _text_of([part], where)})
    return parts


def _text_of(content: str | Sequence[TextPart | OtherPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = None if isinstance(part, OtherPart) else part.refusal if part.type == "refusal" else part.text
        if text is None:
            place = f"{where}.{i}"
            raise ApiError(400, f"{place}: parts of type {part.type!r} are not supported, only text", param=place)
        texts.append(text)
    return "".join(texts)
