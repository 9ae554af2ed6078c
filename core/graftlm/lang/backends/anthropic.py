"""The backend for Anthropic's API, which calls Anthropic's library."""

import asyncio
import json
import os
import weakref
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import wait
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from graftlm.errors import (
    ConfigError,
    EngineError,
    GraftlmError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from graftlm.lang.backends.http import refusal, status_of_event
from graftlm.lang.backends.library import LibraryBackend, check_model, library
from graftlm.lang.backends.openai.dialects import ChatFeatures
from graftlm.lang.event_loop import is_in_shared_loop, shared_loop

if TYPE_CHECKING:
    import anthropic

__all__ = ["Anthropic"]

_CLOSE_TIMEOUT_S: Final = 1.0

#: Field of a chat request -> its name in Anthropic's API.
_NAMES: Final[Mapping[str, str]] = {"model": "model", "max_tokens": "max_tokens", "stop": "stop_sequences"}

#: Fields that the API has, but some versions of the library do not.
_IN_BODY: Final = ("temperature", "top_p", "top_k")

#: stop_reason -> finish_reason of OpenAI's API.
_FINISH_REASONS: Final[Mapping[str, str]] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}

_LACKING: Final = (
    "n", "frequency_penalty", "presence_penalty", "return_logprob", "top_logprobs_num", "return_text_in_logprobs",
)  # fmt: skip


class Anthropic(LibraryBackend):
    """Runs a program's chats on Anthropic's Messages API, through the library `anthropic`.

        set_default_backend(Anthropic("claude-haiku-4-5", api_key=...))
        set_default_backend(Anthropic("demo", base_url="http://127.0.0.1:30000", api_key="none"))

    Args:
        model: the model's name.
        continue_final_message: whether the model can continue a partial message; Anthropic's newer models cannot.
        max_requests: maximum number of active requests; further requests wait.
        client: arguments of `anthropic.AsyncAnthropic`, such as `api_key`, `base_url`, `timeout` and `max_retries`. The
            library reads environment variables, such as ANTHROPIC_API_KEY, for arguments that are not set.

    Raises:
        ConfigError: an argument is invalid, or the library is not installed.
    """

    def __init__(
        self, model: str, *, continue_final_message: bool = True, max_requests: int = 64, **client: Any
    ) -> None:
        check_model(model)
        self._transport = _MessagesApi(client)
        features = ChatFeatures(
            continues=continue_final_message, continue_fields={}, takes_text=True, added=("top_k",), lacking=_LACKING
        )
        super().__init__(model, self._transport, features, max_requests=max_requests)

    def close(self) -> None:
        """Close the connections; see LibraryBackend."""
        self._transport.close()


class _MessagesApi:
    """A Transport that sends chat requests to Anthropic's Messages API."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._library: Any = library("anthropic", "Anthropic")
        self._options = options
        self._open()
        self.url = str(self._client.base_url).rstrip("/")

    def _open(self) -> None:
        self._process_id = os.getpid()
        try:
            self._client: anthropic.AsyncAnthropic = self._library.AsyncAnthropic(**self._options)
        except (TypeError, ValueError, self._library.AnthropicError) as error:
            raise ConfigError(f"the library anthropic refuses its arguments: {error}") from error
        self._finalizer = weakref.finalize(self, _close, self._client)

    def _messages(self) -> Any:
        if self._process_id != os.getpid():  # the parent continues to use its connections
            self._finalizer.detach()
            self._open()
        elif not self._finalizer.alive:
            self._open()
        return self._client.messages

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; see Transport."""
        try:
            message = (await self._messages().create(**_arguments(body))).model_dump()
        except Exception as error:
            raise self._error_of(error) from error
        return {"id": message["id"], "choices": [_choice(message)], "usage": _usage(message["usage"])}

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of the answer to a streamed request; see Transport."""
        usage: dict[str, Any] = {}
        call_id = ""
        try:
            async with await self._messages().create(**_arguments(body), stream=True) as stream:
                async for item in stream:
                    event = item.model_dump()
                    if event["type"] == "message_start":
                        call_id, usage = event["message"]["id"], event["message"]["usage"]
                    if event["type"] == "message_delta":
                        usage = usage | {name: count for name, count in event["usage"].items() if count is not None}
                    yield {"id": call_id, "choices": _changes(event), "usage": _usage(usage)}
        except Exception as error:
            raise self._error_of(error) from error

    def close(self) -> None:
        """Close the connections; the next request opens others."""
        if self._process_id == os.getpid():
            self._finalizer()

    def _error_of(self, error: Exception) -> GraftlmError:
        """Return graftlm's error for an error of the library."""
        its = self._library
        if isinstance(error, its.APITimeoutError):
            return RequestTimeoutError(f"{self.url} did not answer in time{_cause(error)}")
        if isinstance(error, its.APIConnectionError):
            return UnavailableError(f"cannot talk to {self.url}{_cause(error)}")
        if isinstance(error, its.APIStatusError):
            return _refusal(error, self.url)
        if isinstance(error, TypeError | its.AnthropicError):  # no key, or credentials that cannot be read
            return ConfigError(f"the library anthropic cannot send the request: {error}")
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError | ValidationError):
            return EngineError(f"{self.url} answered in another format: {error}")
        if isinstance(error, ValueError):  # such as a long answer that is not streamed, without `timeout`
            return RequestError(f"the library anthropic refuses the request: {error}")
        kind = RequestTimeoutError if "Timeout" in type(error).__name__ else UnavailableError
        return kind(f"cannot talk to {self.url}: {type(error).__name__}: {error}")


def _close(client: "anthropic.AsyncAnthropic") -> None:
    """Close a client in the shared loop; wait for this up to a second, unless the caller runs in that loop."""
    closed = asyncio.run_coroutine_threadsafe(client.close(), shared_loop())
    if not is_in_shared_loop():
        wait([closed], _CLOSE_TIMEOUT_S)


def _cause(error: Exception) -> str:
    """Return the reason of a connection's failure after a colon; "" if the error has no text of its own."""
    text = str(error.__cause__ or "")
    return f": {text}" if text else ""


def _refusal(error: Any, url: str) -> GraftlmError:
    """Return the error for a refusal, or for an error event of a stream, whose HTTP status is that of a success."""
    body = error.body if isinstance(error.body, dict) else {"error": {"message": str(error)}}
    detail = body.get("error", body)
    status = error.status_code if error.status_code >= 400 else status_of_event(detail)
    if status == HTTPStatus.NOT_FOUND:  # the model or the URL is wrong; no feature is missing
        message = detail.get("message", detail) if isinstance(detail, dict) else detail
        return RequestError(f"the server answered 404: {message} ({url})")
    return refusal(status, body)


def _arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the library's `messages.create` for a chat request."""
    messages = list(body["messages"])
    arguments: dict[str, Any] = {name: body[key] for key, name in _NAMES.items() if key in body}
    if messages[0]["role"] == "system":
        arguments["system"] = messages.pop(0)["content"]
    if (form := body.get("response_format")) is not None:
        schema = form["json_schema"]["schema"]
        arguments["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
    in_body = {name: body[name] for name in _IN_BODY if name in body}
    return arguments | {"messages": messages} | ({"extra_body": in_body} if in_body else {})


def _choice(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form."""
    text = "".join([block["text"] for block in message["content"] if block["type"] == "text"])
    thinking = "".join([block["thinking"] for block in message["content"] if block["type"] == "thinking"])
    return {"message": {"content": text, "reasoning_content": thinking}} | _end(message)


def _changes(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an event in OpenAI's form; [] for an event without text and without an end."""
    if event["type"] == "message_delta":
        return [{"delta": {}} | _end(event["delta"])]
    if event["type"] != "content_block_delta":
        return []
    delta = event["delta"]
    return [{"delta": {"content": delta.get("text"), "reasoning_content": delta.get("thinking")}}]


def _end(message: Mapping[str, Any]) -> dict[str, Any]:
    reason = message.get("stop_reason")
    return {"finish_reason": _FINISH_REASONS.get(reason or "", reason), "matched_stop": message.get("stop_sequence")}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return token counts in OpenAI's form; Anthropic counts cached prompt tokens separately."""
    cached = usage.get("cache_read_input_tokens") or 0
    prompt = cached + (usage.get("input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    details = {"cached_tokens": cached}
    return {"prompt_tokens": prompt, "completion_tokens": usage.get("output_tokens"), "prompt_tokens_details": details}
