"""The base of the backends that call a provider's Python library."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from types import ModuleType
from typing import Self

from graftlm.errors import ConfigError, UnsupportedFeatureError
from graftlm.lang.backend import Backend, Generation, GenerationRequest
from graftlm.lang.backends.openai.calls import Calls, Transport
from graftlm.lang.backends.openai.dialects import CHAT_TEXT_FORMAT, ChatDialect, ChatFeatures
from graftlm.lang.backends.openai.fields import DEFAULT_MAX_TOKENS
from graftlm.lang.backends.speculation import SpeculativeBackend
from graftlm.lang.backends.usage import ApiUsage, TokenUsage, UsageMeter
from graftlm.lang.chat_template import ChatTemplate, find_template
from graftlm.lang.choices import ChoiceScore
from graftlm.types import Message

__all__ = ["LibraryBackend", "check_model", "library"]


class LibraryBackend(ABC):
    """A Backend that answers chats, for which a transport calls a library.

    A program's text without chat messages is sent as one message of the user.
    """

    def __init__(
        self,
        model: str,
        transport: Transport,
        features: ChatFeatures,
        *,
        max_requests: int,
        chat_template: str | None = None,
    ) -> None:
        """Create the backend.

        Args:
            transport: calls the library.
            features: the properties of the API.
            max_requests: maximum number of active requests; further requests wait.
            chat_template: name of the template that formats chats in the program's text; None: `chatml`.
        """
        self._meter = UsageMeter()
        self._token_usage = TokenUsage(self._meter)
        self._calls = Calls(transport, self._meter, max_requests)
        self._template = find_template(chat_template or CHAT_TEXT_FORMAT, model)
        self._dialect = ChatDialect(model, self._template, features)
        self._reports_logprobs = "return_logprob" not in features.lacking

    @property
    def usage(self) -> ApiUsage:
        """Numbers of calls and tokens so far, and of those that speculation has saved."""
        return self._meter.usage

    @property
    def token_usage(self) -> TokenUsage:
        """The tokens since the last `token_usage.reset()`."""
        return self._token_usage

    def speculative(self, num_tokens: int) -> Backend:
        """Return a view for one state that can answer several `gen`s with one call; see SpeculatingBackend."""
        return SpeculativeBackend(
            self,
            num_tokens,
            self._meter,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            writes_whole_messages=self._dialect.writes_whole_messages,
            continues_text=False,
        )

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        return await self._calls.generate(self._dialect, request)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt; yields the growing completion; see Backend."""
        return self._calls.stream(self._dialect, request)

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of the first tokens of each choice, along one answer; see Backend."""
        if not self._reports_logprobs:
            raise UnsupportedFeatureError(
                "select: this API reports no log-probabilities; use gen and compare its text with the choices"
            )
        if unconditional:
            raise UnsupportedFeatureError(
                "unconditional_likelihood_normalized: an endpoint cannot score tokens without their prompt; use "
                "another choices_method"
            )
        return await self._calls.path_scores(self._dialect, prompt, choices, messages)

    async def cache_prefix(self, prompt: str) -> None:
        """Do nothing: the service manages its cache, and a call costs money; see Backend."""

    async def chat_template(self) -> ChatTemplate:
        """Return the format of chats in the program's text; the service gets messages, not this text; see Backend."""
        return self._template

    async def flush_cache(self) -> None:
        """Refuse: the API has no such request; see Backend."""
        raise UnsupportedFeatureError(f"flush_cache: {type(self).__name__} has no request that flushes a cache")

    @abstractmethod
    def close(self) -> None:
        """Close the connections; active requests fail. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_model(model: str) -> None:
    """Check the name of a model.

    Raises:
        ConfigError: it is no text, or empty.
    """
    if not isinstance(model, str) or not model:
        raise ConfigError(f"model must be the name of a model of the service, got {model!r}")


def library(name: str, backend: str) -> ModuleType:
    """Import the library of a backend.

    Args:
        name: the name of the library, which is also that of graftlm's extra.
        backend: the class that needs it, for the error.

    Raises:
        ConfigError: the library is not installed.
    """
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(f"{backend} needs the package {name} ({error}). pip install 'graftlm[{name}]'") from error
