"""Conversion of OpenAI's fields into sampling parameters and chat messages."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from graftlm.processes.served_model import ServedModel
from graftlm.sampling_params import GRAMMAR_FIELDS
from graftlm.server.errors import ApiError
from graftlm.server.openai.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    SamplingFields,
    TagStructure,
    TextPart,
)
from graftlm.types import Message, SamplingParams

__all__ = [
    "chat_messages",
    "chat_params",
    "check_model",
    "completion_params",
    "grammar_field",
    "request_adapter",
    "template_args",
]

#: Fields that have the same name and meaning in `SamplingParams`.
_SAME: Final = (
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_regex",
    "stop_token_ids",
    "logit_bias",
    "logits_processors",
    "ignore_eos",
    "skip_special_tokens",
    "json_schema",
    "regex",
    "ebnf",
    "choice",
    "structural_tag",
    "strict",
    "grammar_backend",
    "jump_forward",
    "speculation",
    "masked_logprobs",
    "n",
)

#: Variables of chat templates that clients may not set, because they would replace the template or its result.
_RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

#: Type of a response format -> its fields.
_FORMAT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "at_least_one", "stop_after_first"),
}

#: Value of `top_p` that replaces 0. With this value, only the most likely token can be sampled.
_LEAST_TOP_P: Final = 1e-9


def check_model(name: str | None, model: ServedModel, adapters: Collection[str] = ()) -> str | None:
    """Return the adapter in a model's name, `model:adapter` or `adapter`; None for the model without an adapter.

    Args:
        name: the request's `model`.
        model: the served model.
        adapters: the names of the loaded adapters.

    Raises:
        ApiError: 404, no served model has this name.
    """
    if model.has_name(name):
        return None
    for adapter in adapters:
        if name == adapter:  # vLLM's name
            return adapter
        if name is not None and name.endswith(f":{adapter}") and model.has_name(name.removesuffix(f":{adapter}")):
            return adapter
    served = ", ".join(repr(model.id_with(adapter)) for adapter in (None, *adapters))
    message = f"The model {name!r} does not exist. This server has {served}."
    raise ApiError(404, message, param="model", code="model_not_found")


def request_adapter(body: SamplingFields, model: ServedModel, adapters: Collection[str]) -> str | None:
    """Return the adapter in a request's `model` or `lora_path`; None for the model without an adapter.

    Raises:
        ApiError: 404, the model does not exist; 400, the two fields name different adapters.
    """
    named = check_model(body.model, model, adapters)
    if named is not None and body.lora_path not in (None, named):
        message = (
            f"lora_path names the adapter {body.lora_path!r}, but model names the adapter {named!r}; leave one of them "
            "out"
        )
        raise ApiError(400, message, param="lora_path")
    return named or body.lora_path


def completion_params(body: CompletionRequest) -> SamplingParams:
    """Return the sampling parameters of a completion request.

    Raises:
        RequestError: fields contradict each other.
    """
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of is only supported when it equals n", param="best_of")
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else None
    return SamplingParams(
        **(_common(body) | _grammar(body)),
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        reasoning_end=body.reasoning_end,
        reasoning_begin=body.reasoning_begin,
    )


def chat_params(body: ChatRequest, calls: Mapping[str, Any] | None = None) -> SamplingParams:
    """Return the sampling parameters of a chat request.

    Args:
        calls: grammar parameters that enforce the format of tool calls. These parameters replace the request's grammar.
            None if the answer cannot contain calls.

    Raises:
        RequestError: fields contradict each other, or request an unsupported feature.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = _grammar(body)
    if calls is not None:
        if grammar or any(getattr(body, name) is not None for name in GRAMMAR_FIELDS):
            message = 'an answer that may call tools cannot have another grammar; set tool_choice: "none"'
            raise ApiError(400, message, param="tools")
        grammar = dict(calls)
    return SamplingParams(**(_common(body) | grammar), max_tokens=limit, logprobs=logprobs)


def grammar_field(body: SamplingFields) -> str | None:
    """Return the name of the field with the request's grammar, except `tools`; None if there is no such field."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    return next((name for name in GRAMMAR_FIELDS if getattr(body, name) is not None), None)


def chat_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return messages in the form that chat templates expect.

    Raises:
        ApiError: 400, a part of a message is not text.
    """
    return [_message(i, message) for i, message in enumerate(messages)]


def template_args(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template.

    Raises:
        ApiError: 400, the client set a reserved variable.
    """
    given = dict(body.chat_template_kwargs or {})
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise ApiError(400, f"chat_template_kwargs may not contain {reserved[0]!r}", param="chat_template_kwargs")
    if body.reasoning_effort is not None:
        given.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message:
        return given | {"continue_final_message": True, "add_generation_prompt": False}
    return given | {"add_generation_prompt": body.add_generation_prompt is not False}


def _common(body: SamplingFields) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    values = {name: getattr(body, name) for name in _SAME}
    params = {name: value for name, value in values.items() if value is not None}
    if body.top_p is not None:
        params["top_p"] = max(body.top_p, _LEAST_TOP_P)
    if body.top_k is not None and body.top_k > 0:
        params["top_k"] = body.top_k
    if body.seed is not None:
        params["seed"] = body.seed % 2**63
    params["include_stop"] = bool(body.include_stop_str_in_output)
    return params


def _grammar(body: SamplingFields) -> dict[str, Any]:
    response_format = body.response_format
    if response_format is None:
        return {}
    _check_fields(response_format)
    if response_format.type == "text":
        return {}
    if any(getattr(body, name) is not None for name in GRAMMAR_FIELDS):
        message = f"response_format cannot be combined with {', '.join(GRAMMAR_FIELDS)}"
        raise ApiError(400, message, param="response_format")
    if response_format.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if response_format.type == "structural_tag":
        return {"structural_tag": _structural_tag(response_format)}
    if response_format.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", param="response_format.json_schema")
    if response_format.json_schema.schema_ is None:
        where = "response_format.json_schema.schema"
        raise ApiError(400, f"{where}: the schema is missing; for any object, use type: json_object", param=where)
    own = response_format.json_schema.strict
    strict = body.strict if own is None else own
    return {"json_schema": response_format.json_schema.schema_, "strict": strict is not False}


def _check_fields(response_format: ResponseFormat) -> None:
    """Refuse fields that belong to another type of response format, because they would have no effect.

    Raises:
        ApiError: 400, there is such a field.
    """
    for kind, names in _FORMAT_FIELDS.items():
        stray = [name for name in names if kind != response_format.type and getattr(response_format, name) is not None]
        if stray:
            where = f"response_format.{stray[0]}"
            message = (
                f"{where} is not allowed with type {response_format.type!r}; set type: {kind!r}, or leave the field out"
            )
            raise ApiError(400, message, param=where)


def _structural_tag(response_format: ResponseFormat) -> dict[str, Any]:
    """Return the structural tag that a response format contains. SGLang's clients send this form."""
    for name in ("structures", "triggers"):
        if getattr(response_format, name) is None:
            raise ApiError(400, f"response_format.{name} is missing", param=f"response_format.{name}")
    structures = [_structure(part) for part in response_format.structures or ()]
    return {
        "triggers": response_format.triggers,
        "structures": structures,
        "at_least_one": bool(response_format.at_least_one),
        "stop_after_first": bool(response_format.stop_after_first),
    }


def _structure(part: TagStructure) -> dict[str, Any]:
    constraint: dict[str, Any] = {} if part.regex is None else {"regex": part.regex}
    if part.schema_ is not None or not constraint:
        constraint["schema"] = part.schema_ or {}
    return {"begin": part.begin, **constraint, "end": part.end}


def _message(index: int, message: ChatMessage) -> Message:
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": _content(index, message)}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            fields[name] = value
    return fields


def _content(index: int, message: ChatMessage) -> str | list[dict[str, Any]] | None:
    if message.content is None:
        return "" if message.tool_calls else None
    if isinstance(message.content, str):
        return message.content
    parts: list[dict[str, Any]] = []
    for j, part in enumerate(message.content):
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.shown or ""})
        elif part.type == "image_url":
            parts.append(part.model_dump())
        else:
            where = f"messages.{index}.content.{j}"
            raise ApiError(
                400, f"{where}: parts of type {part.type!r} are not supported, only text and image_url", param=where
            )
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
