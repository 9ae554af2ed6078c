"""The backend for the services that LiteLLM calls."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

from graftlm.errors import (
    ConfigError,
    GraftlmError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedFeatureError,
)
from graftlm.lang.backends.http import refusal
from graftlm.lang.backends.library import LibraryBackend, check_model, library
from graftlm.lang.backends.openai.dialects import ChatFeatures

__all__ = ["LiteLLM"]

#: LiteLLM's provider of Anthropic's API, which continues a partial message without further fields.
_ANTHROPIC: Final = "anthropic"

#: Class of LiteLLM's error -> graftlm's class. The first class of an error's bases in this table counts.
_ERRORS: Final[Mapping[str, type[GraftlmError]]] = {
    "ContextWindowExceededError": PromptTooLongError,
    "UnsupportedParamsError": UnsupportedFeatureError,
    "NotFoundError": RequestError,
    "Timeout": RequestTimeoutError,
    "RateLimitError": QueueFullError,
    "ServiceUnavailableError": UnavailableError,
    "BadGatewayError": UnavailableError,
    "APIConnectionError": UnavailableError,
    "InternalServerError": UnavailableError,  # LiteLLM also raises it if a service cannot be reached
}


class LiteLLM(LibraryBackend):
    """Runs a program's chats on a service that the library `litellm` can call.

        set_default_backend(LiteLLM("anthropic/claude-haiku-4-5", api_key=...))
        set_default_backend(LiteLLM("hosted_vllm/demo", base_url="http://127.0.0.1:30000/v1"))

    Args:
        model: LiteLLM's name of the model: provider/model.
        chat_template: name of the template that formats chats in the program's text; the service gets messages, not
            this text. None: `chatml`.
        api_key: the service's key. If it is not set, the library reads the environment variable of the provider.
        organization: organization of the key.
        base_url: URL of the service; None: that of the provider.
        timeout: seconds after which a request fails.
        max_retries: number of times that the library repeats a failed request; None: the library's default.
        default_headers: HTTP headers of each request.
        continue_final_message: whether the service can continue a partial message; None: yes for the provider
            `anthropic`, no for others.
        max_requests: maximum number of active requests; further requests wait.
        options: further arguments of `litellm.acompletion`, such as `extra_body`.

    Raises:
        ConfigError: an argument is invalid, the library is not installed, or it does not know the provider.
    """

    def __init__(
        self,
        model: str,
        chat_template: str | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = 600.0,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
        *,
        continue_final_message: bool | None = None,
        max_requests: int = 64,
        **options: Any,
    ) -> None:
        check_model(model)
        own = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "timeout": timeout,
            "max_retries": max_retries,
            "extra_headers": None if default_headers is None else dict(default_headers),
        }
        transport = _Completion(model, options | {name: value for name, value in own.items() if value is not None})
        is_anthropic = transport.provider == _ANTHROPIC
        continues = is_anthropic if continue_final_message is None else continue_final_message
        features = ChatFeatures(continues=continues, takes_text=True, added=("top_k",))
        if is_anthropic:
            features = ChatFeatures(continues=continues, continue_fields={}, takes_text=True, added=("top_k",))
        super().__init__(model, transport, features, chat_template=chat_template, max_requests=max_requests)

    def close(self) -> None:
        """Do nothing: the library keeps its connections for other callers; see LibraryBackend."""


class _Completion:
    """A Transport that calls `litellm.acompletion`."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._library: Any = library("litellm", "LiteLLM")
        self._options = options
        try:
            _, self.provider, _, _ = self._library.get_llm_provider(model, api_base=options.get("base_url"))
        except self._library.BadRequestError as error:
            raise ConfigError(f"LiteLLM has no provider for the model {model!r}: {error}") from error
        self.url = options.get("base_url") or f"LiteLLM's provider {self.provider}"

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request; see Transport."""
        try:
            answer = await self._library.acompletion(**body, **self._options)
        except Exception as error:
            raise _error_of(error) from error
        return answer.model_dump()

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the events of the answer to a streamed request; see Transport."""
        try:
            async with aclosing(await self._library.acompletion(**body, **self._options)) as chunks:
                async for chunk in chunks:
                    yield chunk.model_dump()
        except Exception as error:
            raise _error_of(error) from error


def _error_of(error: Exception) -> GraftlmError:
    """Return graftlm's error for an error of the library."""
    names = [kind.__name__ for kind in type(error).__mro__]
    known = next((_ERRORS[name] for name in names if name in _ERRORS), None)
    if known is not None:
        return known(str(error))
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return refusal(status, str(error))
    return UnavailableError(f"LiteLLM failed: {type(error).__name__}: {error}")
