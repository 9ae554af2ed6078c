"""The contract of backends, which run the requests of programs.

A backend is a small object with six methods. They run in the language's event loop and must not block it. If a call of
a method is cancelled, the backend must free the request's resources in the engine or server. `graftlm.lang.backends`
has backends for an engine in this process, for a graftlm or SGLang server, for an OpenAI-compatible endpoint, and for
the libraries of Anthropic and LiteLLM. `graftlm.testing.BackendConformance` checks this contract.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Message

__all__ = ["Backend", "Generation", "GenerationRequest", "PictureBackend", "SpeculatingBackend"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete.

    Attributes:
        prompt: text. The backend adds tokens that the model needs before each prompt, such as a beginning-of-sequence
            token.
        sampling: sampling parameters; `dtype` is None, because it has been replaced by a `regex`.
        messages: the messages of the chat in the prompt, oldest first, for backends with a chat API. The last message
            is open: its content is the text so far. Empty if the prompt has no open chat message.
        images: the contents of the pictures in the prompt, in the order of their markers; only for a `PictureBackend`.
    """

    prompt: str
    sampling: Sampling
    messages: tuple[Message, ...] = ()
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion; in a stream, the completion so far.

    Attributes:
        meta_info: id, finish_reason, prompt_tokens, completion_tokens, cached_tokens and, if requested,
            log-probabilities, under SGLang's names.
    """

    text: str
    meta_info: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """Runs the requests of programs.

    A coroutine that fails raises a `graftlm.errors.GraftlmError`: `RequestError` for a wrong request,
    `UnsupportedFeatureError` for a feature that the backend lacks, `EngineError` for a failure of the backend.
    """

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt and return its `n` completions, in order.

        The text of a completion does not contain the stop string that ended it. Requests beyond the backend's capacity
        wait in this method.
        """

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt with `n` = 1 and yield the growing completion; the last one is complete."""

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of each choice after the prompt; all choices are computed in one batch.

        A choice's tokens are the tokens of `prompt + choice` after the longest prefix that they share with the tokens
        of `prompt`.

        Args:
            unconditional: also return the log-probabilities of the choices' tokens without the prompt.
            messages: see GenerationRequest.

        Raises:
            UnsupportedFeatureError: this backend does not report these log-probabilities.
        """

    async def cache_prefix(self, prompt: str) -> None:
        """Compute and cache a prompt's keys and values, because several requests will start with this prompt.

        This is a hint: a backend that cannot cache prompts does nothing.
        """

    async def chat_template(self) -> ChatTemplate:
        """Return the format of the model's chats.

        Raises:
            UnsupportedFeatureError: the model has no chat format.
        """

    async def flush_cache(self) -> None:
        """Remove every cached prefix that no running request uses.

        Raises:
            UnsupportedFeatureError: the backend has no access to its cache.
        """


@runtime_checkable
class PictureBackend(Protocol):
    """A Backend whose `generate` and `stream` accept pictures."""

    async def image_marker(self) -> str:
        """Return the text that stands for a picture in a prompt.

        Raises:
            UnsupportedFeatureError: the model cannot use pictures.
        """


@runtime_checkable
class SpeculatingBackend(Protocol):
    """A Backend that can answer several `gen`s of a state with one call.

    `@function(num_api_spec_tokens=...)` enables this. It is meant for backends with expensive calls, such as those that
    charge the prompt of each call.
    """

    def speculative(self, num_tokens: int) -> Backend:
        """Return a view of this backend for one state, which may request up to `num_tokens` tokens in one call."""
