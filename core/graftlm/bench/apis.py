"""The HTTP interfaces that can be measured, with their formats of requests and events."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from graftlm.bench.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, WorkItem
from graftlm.bench.settings import ApiName

__all__ = ["API_TYPES", "Api", "Event", "RequestOptions", "error_text"]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options that all requests of a run have in common.

    Attributes:
        model: the model's name, for OpenAI's interfaces.
        temperature: 0 selects the most likely token.
        ignore_eos: whether to continue after the end-of-sequence token.
    """

    model: str
    temperature: float
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Event:
    """The content of one event of an answer. Counts are totals of the answer so far; None: the event has no count.

    Attributes:
        has_text: whether the event contains new text, or other output of the model such as a tool call.
        output_tokens: number of output tokens.
        prompt_tokens: number of prompt tokens.
        cached_tokens: number of prompt tokens that were cached.
        finish_reason: set when the answer is complete.
        error: set if the answer ends with an error.
    """

    has_text: bool = False
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None


class Api(ABC):
    """One HTTP interface. It writes requests and reads events, and stores nothing about single requests."""

    #: Path part of the URL.
    path: ClassVar[str]
    #: The forms of prompts that the interface accepts.
    accepts: ClassVar[tuple[type, ...]]

    def __init__(self, options: RequestOptions) -> None:
        self._options = options

    def body(self, item: WorkItem) -> bytes:
        """Return a streaming request, as JSON."""
        return msgspec.json.encode(self._fields(item))

    @abstractmethod
    def _fields(self, item: WorkItem) -> dict[str, Any]: ...

    @abstractmethod
    def read(self, data: bytes) -> Event:
        """Return the content of an event.

        Args:
            data: the event's JSON.

        Raises:
            msgspec.MsgspecError: the data is not JSON, or has another structure.
        """


class _WireError(msgspec.Struct):
    message: str = ""


class _NativeFinish(msgspec.Struct):
    type: str
    message: str = ""


class _NativeMeta(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _NativeFinish | None = None


class _NativeEvent(msgspec.Struct):
    # Text and token ids of an event repeat the answer so far and are not read; the count shows the new tokens.
    meta_info: _NativeMeta = msgspec.field(default_factory=_NativeMeta)
    error: _WireError | str | None = None


class NativeApi(Api):
    """The interface POST /generate."""

    path = "/generate"
    accepts = (TextPrompt, TokenPrompt)
    _decoder: Final = msgspec.json.Decoder(_NativeEvent)

    def read(self, data: bytes) -> Event:
        """Return the content of an event."""
        event = self._decoder.decode(data)
        meta, finish = event.meta_info, event.meta_info.finish_reason
        aborted = finish.message or "the server aborted the request" if finish and finish.type == "abort" else None
        return Event(
            output_tokens=meta.completion_tokens,
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            finish_reason=None if finish is None else finish.type,
            error=aborted or _message(event.error),
        )

    def _fields(self, item: WorkItem) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": item.output_tokens,
            "temperature": self._options.temperature,
            "ignore_eos": self._options.ignore_eos,
        }
        return _native_prompt(item.prompt) | {"sampling_params": sampling, "stream": True}


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether the event contains output of the model. A chat's first event contains only the role."""
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _WireError | str | None = None


class _OpenAIApi(Api):
    """The common part of OpenAI's interfaces."""

    _decoder: Final = msgspec.json.Decoder(_OpenAIEvent)

    def read(self, data: bytes) -> Event:
        """Return the content of an event."""
        event = self._decoder.decode(data)
        usage = event.usage or _NO_USAGE
        details = usage.prompt_tokens_details
        finish = next((choice.finish_reason for choice in event.choices if choice.finish_reason), None)
        aborted = f"the answer ended with finish_reason {finish!r}" if finish in {"abort", "error"} else None
        return Event(
            has_text=any(choice.has_text for choice in event.choices),
            output_tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            finish_reason=finish,
            error=aborted or _message(event.error),
        )

    def _fields(self, item: WorkItem) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self._options.model,
            "max_tokens": item.output_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.ignore_eos:
            fields["ignore_eos"] = True  # an extension, which some servers refuse
        return fields


class CompletionsApi(_OpenAIApi):
    """The interface POST /v1/completions."""

    path = "/v1/completions"
    accepts = (TextPrompt, TokenPrompt)

    def _fields(self, item: WorkItem) -> dict[str, Any]:
        (prompt,) = _native_prompt(item.prompt).values()
        return super()._fields(item) | {"prompt": prompt}


class ChatApi(_OpenAIApi):
    """The interface POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    accepts = (TextPrompt, ChatPrompt)

    def _fields(self, item: WorkItem) -> dict[str, Any]:
        return super()._fields(item) | {"messages": _messages(item.prompt)}


API_TYPES: Final[dict[ApiName, type[Api]]] = {
    "native": NativeApi,
    "openai-completions": CompletionsApi,
    "openai-chat": ChatApi,
}

_NO_USAGE: Final = _Usage()


class _ErrorBody(msgspec.Struct):
    error: _WireError | str | None = None


def error_text(body: bytes) -> str:
    """Return the error message in a refused request's answer, whose format may be unknown."""
    try:
        message = _message(msgspec.json.decode(body, type=_ErrorBody).error)
    except msgspec.MsgspecError:
        message = None
    return message or body.decode(errors="replace").strip()


def _native_prompt(prompt: Prompt) -> dict[str, Any]:
    match prompt:
        case TextPrompt(text):
            return {"text": text}
        case TokenPrompt(token_ids):
            return {"input_ids": token_ids.tolist()}
        case ChatPrompt():
            raise TypeError("a chat can only be sent to a chat interface")


def _messages(prompt: Prompt) -> Any:
    match prompt:
        case TextPrompt(text):
            return [{"role": "user", "content": text}]
        case ChatPrompt(messages):
            return messages
        case TokenPrompt():
            raise TypeError("token ids cannot be sent to a chat interface")


def _message(error: _WireError | str | None) -> str | None:
    """Return the error message in an event; None if it has none."""
    if isinstance(error, _WireError):
        return error.message or "the stream ended with an error"
    return error
