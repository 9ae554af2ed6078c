"""The contract between the language and what runs its requests.

A backend is a small object with six methods. They run in the language's event loop and must not block it; cancelling
one must free whatever the request holds where it runs. `graftlm.lang.backends` has three: for an engine in this
process, for a graftlm or SGLang server, and for an endpoint like OpenAI's. `graftlm.testing.BackendConformance` checks
what is said here.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Message

__all__ = ["Backend", "Generation", "GenerationRequest", "SpeculatingBackend"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete.

    Attributes:
        prompt: text; the backend adds what the model wants before each prompt, such as a beginning-of-sequence token.
        sampling: without `dtype`, which has become a `regex`.
        messages: the chat that the prompt writes, oldest first, for backends that take chats. The last message is open,
            and holds what it says so far. Empty where the prompt is no chat, or none of its messages is open.
    """

    prompt: str
    sampling: Sampling
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion; in a stream, all of it so far.

    Attributes:
        meta_info: id, finish_reason, prompt_tokens, completion_tokens, cached_tokens and, when asked for,
            log-probabilities, under SGLang's names.
    """

    text: str
    meta_info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """What runs a program's requests.

    Every coroutine raises a `graftlm.errors.GraftlmError` when it fails: `RequestError` when the request is at fault,
    `UnsupportedFeatureError` for what this backend cannot do, `EngineError` when the backend is.
    """

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; returns its `n` completions, in order.

        One that ends at a stop string ends before it. Requests beyond what a backend takes at a time wait here.
        """

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt once (`n` is 1), yielding a completion whose text grows; the last one is whole."""

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return how likely each choice is behind the prompt, with all choices in one batch.

        A choice's tokens are those of `prompt + choice` that `prompt` alone does not begin with.

        Args:
            unconditional: also say how likely the choices' tokens are without the prompt.
            messages: as of GenerationRequest.

        Raises:
            UnsupportedFeatureError: this backend has no log-probabilities, or not these.
        """

    async def cache_prefix(self, prompt: str) -> None:
        """Have a prompt's keys and values computed and cached, so that several requests behind it share them.

        A hint: a backend that cannot have it done does nothing.
        """

    async def chat_template(self) -> ChatTemplate:
        """Return how the model's chats are written.

        Raises:
            UnsupportedFeatureError: it has no chat format.
        """

    async def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses.

        Raises:
            UnsupportedFeatureError: its cache is not its own.
        """


@runtime_checkable
class SpeculatingBackend(Protocol):
    """A Backend that can answer several `gen`s of a state by one call; `@function(num_api_spec_tokens=...)` asks it to.

    For backends whose calls are dear, such as those that bill a prompt each time.
    """

    def speculative(self, num_tokens: int) -> Backend:
        """Return one state's view of this backend, which may ask for up to `num_tokens` tokens at a time."""
