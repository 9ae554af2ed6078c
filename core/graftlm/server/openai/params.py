"""From OpenAI's fields to sampling parameters and chats."""

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

#: Fields whose name and meaning are ours as well.
_SAME: Final = (
    "temperature",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop",
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
    "n",
)

#: Variables of chat templates that are not the client's to set: they would replace the template or its result.
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

#: The type of a response format -> the fields that it has.
_FORMAT_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("json_schema",),
    "structural_tag": ("structures", "triggers", "at_least_one", "stop_after_first"),
}

#: What top_p 0 means: the most likely token alone.
_LEAST_TOP_P: Final = 1e-9


def check_model(name: str | None, model: ServedModel, adapters: Collection[str] = ()) -> str | None:
    """Return the adapter that a model's name contains, as in `model:adapter`; None for the model alone.

    Args:
        adapters: the names of loaded adapters.

    Raises:
        ApiError: 404, the name is none of the served models.
    """
    if model.has_name(name):
        return None
    for adapter in adapters:
        if name is not None and name.endswith(f":{adapter}") and model.has_name(name.removesuffix(f":{adapter}")):
            return adapter
    served = ", ".join(repr(model.id_with(adapter)) for adapter in (None, *adapters))
    message = f"The model {name!r} does not exist. This server has {served}."
    raise ApiError(404, message, param="model", code="model_not_found")


def request_adapter(body: SamplingFields, model: ServedModel, adapters: Collection[str]) -> str | None:
    """Return the adapter that a request names, in `model` or in `lora_path`; None for the model alone.

    Raises:
        ApiError: 404, the model does not exist; 400, two adapters are named.
    """
    named = check_model(body.model, model, adapters)
    if named is not None and body.lora_path not in (None, named):
        message = f"lora_path: {body.lora_path!r} differs from the adapter in model, {named!r}; name one of them"
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
        calls: those that hold the answer to the format of tool calls; None when the request's own grammar counts.

    Raises:
        RequestError: fields contradict each other, or ask for what is not supported.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    grammar = _grammar(body)
    if calls is not None:
        if grammar or any(getattr(body, name) is not None for name in GRAMMAR_FIELDS):
            message = 'an answer that may call tools follows no other grammar; set tool_choice: "none"'
            raise ApiError(400, message, param="tools")
        grammar = dict(calls)
    return SamplingParams(**(_common(body) | grammar), max_tokens=limit, logprobs=logprobs)


def grammar_field(body: SamplingFields) -> str | None:
    """Return the field that the grammar of a request comes from, tools aside; None if it has none."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    return next((name for name in GRAMMAR_FIELDS if getattr(body, name) is not None), None)


def chat_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return messages as a chat template takes them.

    Raises:
        ApiError: a part of one is no text.
    """
    return [_message(i, message) for i, message in enumerate(messages)]


def template_args(body: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template.

    Raises:
        ApiError: one of them is not the client's to set.
    """
    given = dict(body.chat_template_kwargs or {})
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise ApiError(400, f"chat_template_kwargs may not hold {reserved[0]!r}", param="chat_template_kwargs")
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
    wanted = body.response_format
    if wanted is None:
        return {}
    _check_fields(wanted)
    if wanted.type == "text":
        return {}
    if any(getattr(body, name) is not None for name in GRAMMAR_FIELDS):
        raise ApiError(400, f"response_format excludes {', '.join(GRAMMAR_FIELDS)}", param="response_format")
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.type == "structural_tag":
        return {"structural_tag": _structural_tag(wanted)}
    if wanted.json_schema is None:
        raise ApiError(400, "response_format.json_schema is missing", param="response_format.json_schema")
    if wanted.json_schema.schema_ is None:
        where = "response_format.json_schema.schema"
        raise ApiError(400, f"{where}: the schema is missing; for any object, use type: json_object", param=where)
    own = wanted.json_schema.strict
    strict = body.strict if own is None else own
    return {"json_schema": wanted.json_schema.schema_, "strict": strict is not False}


def _check_fields(wanted: ResponseFormat) -> None:
    """Refuse the fields of another type, which would be without effect."""
    for kind, names in _FORMAT_FIELDS.items():
        stray = [name for name in names if kind != wanted.type and getattr(wanted, name) is not None]
        if stray:
            where = f"response_format.{stray[0]}"
            message = f"{where}: not a field of type {wanted.type!r}; set type: {kind!r}, or leave it out"
            raise ApiError(400, message, param=where)


def _structural_tag(wanted: ResponseFormat) -> dict[str, Any]:
    """Return the tag of a response format, which SGLang's clients write."""
    for name in ("structures", "triggers"):
        if getattr(wanted, name) is None:
            raise ApiError(400, f"response_format.{name} is missing", param=f"response_format.{name}")
    structures = [_structure(part) for part in wanted.structures or ()]
    return {
        "triggers": wanted.triggers,
        "structures": structures,
        "at_least_one": bool(wanted.at_least_one),
        "stop_after_first": bool(wanted.stop_after_first),
    }


def _structure(part: TagStructure) -> dict[str, Any]:
    held: dict[str, Any] = {} if part.regex is None else {"regex": part.regex}
    if part.schema_ is not None or not held:
        held["schema"] = part.schema_ or {}
    return {"begin": part.begin, **held, "end": part.end}


def _message(index: int, message: ChatMessage) -> Message:
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": _content(index, message)}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            fields[name] = value
    return fields


def _content(index: int, message: ChatMessage) -> str | None:
    if message.content is None:
        return "" if message.tool_calls else None
    if isinstance(message.content, str):
        return message.content
    pieces = []
    for j, part in enumerate(message.content):
        if not isinstance(part, TextPart):
            where = f"messages.{index}.content.{j}"
            raise ApiError(400, f"{where}: parts of type {part.type!r} are not supported, only text", param=where)
        pieces.append(part.shown or "")
    return "".join(pieces)
