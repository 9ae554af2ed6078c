"""The base of the backends that send a program's requests to a service with calls of OpenAI's API."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Self

from graftlm.errors import UnsupportedFeatureError
from graftlm.lang.backend import Backend, Generation, GenerationRequest
from graftlm.lang.backends.openai.calls import Calls, Transport
from graftlm.lang.backends.openai.dialects import Dialect
from graftlm.lang.backends.openai.fields import DEFAULT_MAX_TOKENS
from graftlm.lang.backends.speculation import SpeculativeBackend
from graftlm.lang.backends.usage import ApiUsage, TokenUsage, UsageMeter
from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.types import Message

__all__ = ["ApiBackend"]


class ApiBackend(ABC):
    """A Backend whose calls are counted, limited in number, and written in a dialect of OpenAI's API."""

    def __init__(self, transport: Transport, dialect: Dialect, *, max_requests: int, continues_text: bool) -> None:
        """Create the backend.

        Args:
            transport: sends the calls.
            dialect: writes the calls and reads their answers.
            max_requests: maximum number of active requests; further requests wait.
            continues_text: whether the service completes text that is not a chat.
        """
        self._meter = UsageMeter()
        self._token_usage = TokenUsage(self._meter)
        self._calls = Calls(transport, self._meter, max_requests)
        self._dialect = dialect
        self._continues_text = continues_text

    @property
    def usage(self) -> ApiUsage:
        """Numbers of calls and tokens so far, and numbers of calls and tokens that speculation has saved."""
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
            continues_text=self._continues_text,
        )

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        return await self._calls.generate(self._dialect, request)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt; yields the growing completion; see Backend."""
        return self._calls.stream(self._dialect, request)

    async def cache_prefix(self, prompt: str) -> None:
        """Do nothing: the service manages its cache, and a call costs money; see Backend."""

    async def flush_cache(self) -> None:
        """Refuse: the API has no such request; see Backend."""
        raise UnsupportedFeatureError(f"flush_cache: {type(self).__name__}'s API has no request that flushes a cache")

    @abstractmethod
    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of each choice; see Backend."""

    @abstractmethod
    async def chat_template(self) -> ChatTemplate:
        """Return the format of chats in the program's text; see Backend."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections; active requests fail. May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
