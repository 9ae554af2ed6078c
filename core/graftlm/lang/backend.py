"""The contract between the language and what runs its requests.

A backend is a small object with five coroutines. They run in the language's event loop and must not block it;
cancelling one must free whatever the request holds where it runs. `graftlm.lang.backends` has two: one for an engine in
this process, one for a server.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling

__all__ = ["Backend", "Generation", "GenerationRequest"]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete.

    Attributes:
        prompt: text; the backend adds what the model wants before each prompt, such as a beginning-of-sequence token.
        sampling: without `dtype`, which has become a `regex`.
    """

    prompt: str
    sampling: Sampling


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
        """Complete a prompt; returns its `n` completions, in order."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt once (`n` is 1), yielding a completion whose text grows; the last one is whole."""

    async def score(self, prompt: str, choices: Sequence[str], *, unconditional: bool) -> list[ChoiceScore]:
        """Return how likely each choice is behind the prompt, with all choices in one batch.

        A choice's tokens are those of `prompt + choice` that `prompt` alone does not begin with.

        Args:
            unconditional: also say how likely the choices' tokens are without the prompt.
        """

    async def cache_prefix(self, prompt: str) -> None:
        """Have a prompt's keys and values computed and cached, so that several requests behind it share them."""

    async def chat_template(self) -> ChatTemplate:
        """Return how the model's chats are written.

        Raises:
            UnsupportedFeatureError: it has no chat format.
        """

    async def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
