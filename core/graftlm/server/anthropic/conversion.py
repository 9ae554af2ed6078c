"""Converts Anthropic requests to chat requests."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from graftlm.server.anthropic.requests import (
    CountTokensRequest,
    CustomTool,
    MessagesRequest,
    MessageTurn,
    OtherBlock,
    OtherTool,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from graftlm.server.errors import ApiError
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.translated import translated

__all__ = ["ANTHROPIC_NAMES", "chat_request"]

#: Part of a field's path in a chat request -> its name in Anthropic's API.
ANTHROPIC_NAMES: Final[Mapping[str, str]] = {
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}

#: Fields that have the same name and meaning in chat requests.
_SAME: Final = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stream",
    "logit_bias",
    "cache_salt",
    "priority",
    "timeout_s",
    "request_id",
)


def chat_request(body: MessagesRequest | CountTokensRequest) -> ChatRequest:
    """Return the chat request that generates the answer.

    Raises:
        ApiError: 400, the request uses a feature that graftlm does not support.
    """
    fields: dict[str, Any] = {"messages": _messages(body)} | _tools(body) | _template(body)
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        json_schema = {"name": "output", "schema": schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in _SAME}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    else:
        fields["model"] = body.model
    return translated(fields)


def _template(body: PromptFields) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        is_on = body.thinking.type == "enabled"
        # Qwen's chat templates read the first name, DeepSeek's the second.
        variables = {"enable_thinking": is_on, "thinking": is_on} | variables
    fields: dict[str, Any] = {"chat_template_kwargs": variables} if variables else {}
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    return fields


def _tools(body: PromptFields) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(i, tool) for i, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None:
        return fields
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name: the name of the tool is missing", param="tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(index: int, tool: CustomTool | OtherTool) -> dict[str, Any]:
    if isinstance(tool, OtherTool):
        where = f"tools.{index}"
        raise ApiError(400, f"{where}: tools of type {tool.type!r} are not supported, only 'custom'", param=where)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


def _messages(body: PromptFields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text_of(body.system, "system")})
    for i, turn in enumerate(body.messages):
        added = _assistant_message(i, turn) if turn.role == "assistant" else _other_messages(i, turn)
        for message in added:
            _append(messages, message)
    return messages


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message. Consecutive user messages are merged, because many templates require it."""
    last = messages[-1] if messages else {}
    if message["role"] == last.get("role") == "user":
        last["content"] = _joined(last["content"], message["content"])
    else:
        messages.append(message)


def _other_messages(index: int, turn: MessageTurn) -> list[dict[str, Any]]:
    """Return the messages of a user or system turn, which contains tool results and text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    messages: list[dict[str, Any]] = []
    for j, block in enumerate(turn.content):
        where = f"messages.{index}.content.{j}"
        match block:
            case TextBlock(text=text):
                _append(messages, {"role": turn.role, "content": text})
            case OtherBlock(type="image") if turn.role == "user":
                _append(messages, {"role": "user", "content": [_image_part(block, where)]})
            case ToolResultBlock(tool_use_id=call_id, content=content) if turn.role == "user":
                text = "" if content is None else _text_of(content, f"{where}.content")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            case _:
                raise _refused(block, where, turn.role)
    return messages or [{"role": turn.role, "content": ""}]


def _joined(first: Any, second: Any) -> Any:
    """Return two contents of user messages as one: texts on separate lines, or parts if there are pictures."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [
        *([{"type": "text", "text": first}] if isinstance(first, str) else first),
        *([{"type": "text", "text": second}] if isinstance(second, str) else second),
    ]


def _image_part(block: OtherBlock, where: str) -> dict[str, Any]:
    source = (block.model_extra or {}).get("source")
    source = source if isinstance(source, dict) else {}
    url = source.get("url")
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type')};base64,{source['data']}"
    if not isinstance(url, str):
        raise ApiError(400, f"{where}.source must have the type base64 or url", param=f"{where}.source")
    return {"type": "image_url", "image_url": {"url": url}}


def _assistant_message(index: int, turn: MessageTurn) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": "assistant", "content": turn.content}]
    text, reasoning, calls = "", "", []
    for j, block in enumerate(turn.content):
        match block:
            case TextBlock(text=more):
                text += more
            case ThinkingBlock(thinking=more):
                reasoning += more
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case OtherBlock(type="redacted_thinking"):
                pass  # only Anthropic's models can decrypt this block
            case _:
                raise _refused(block, f"messages.{index}.content.{j}", turn.role)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text_of(content: str | Sequence[TextBlock | OtherBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _refused(block, f"{where}.{i}", "these blocks")
        texts.append(block.text)
    return "\n".join(texts)


def _refused(block: Any, where: str, role: str) -> ApiError:
    return ApiError(400, f"{where}: blocks of type {block.type!r} are not supported here ({role})", param=where)
