"""From prompts and sampling parameters to requests: every check that needs no device."""

import reprlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvalidPromptError, PromptTooLongError, SamplingParamsError, UnsupportedFeatureError
from graftlm.scheduling import Request
from graftlm.scheduling.request import StopWatch
from graftlm.types import SamplingParams, TokenIds

__all__ = ["Intake", "IntakeLimits", "completion_seed"]

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What a request may be.

    Attributes:
        vocab_size: token ids are below it.
        context_len: tokens of prompt and output together at most.
        memory_tokens: tokens that the KV memory holds.
        eos_token_ids: tokens that end an answer.
        logits_processors: names a request may use.
    """

    vocab_size: int
    context_len: int
    memory_tokens: int
    eos_token_ids: tuple[int, ...]
    logits_processors: frozenset[str] = frozenset()


class Intake:
    """Turns what a user asks into requests that the scheduler can trust."""

    def __init__(
        self,
        limits: IntakeLimits,
        make_stop_watch: Callable[[SamplingParams], StopWatch],
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self._make_stop_watch = make_stop_watch
        self._clock = clock

    def check_prompt(self, token_ids: Sequence[int] | NDArray[Any]) -> TokenIds:
        """Return a prompt as int32 [n].

        Raises:
            InvalidPromptError: it is empty, not made of integers, or holds an id outside the vocabulary.
            PromptTooLongError: it leaves no room for output.
        """
        prompt = _as_array(token_ids)
        if not len(prompt):
            raise InvalidPromptError("the prompt is empty; give at least one token")
        vocab_size = self.limits.vocab_size
        outside = prompt[(prompt < 0) | (prompt >= vocab_size)]
        if len(outside):
            raise InvalidPromptError(f"token id {int(outside[0])} is outside the vocabulary of {vocab_size} tokens")
        if len(prompt) >= self.limits.context_len:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens; the context holds {self.limits.context_len}, one of them for "
                "output. Shorten the prompt or raise model.context_len."
            )
        return np.ascontiguousarray(prompt, dtype=np.int32)

    def check_params(self, params: SamplingParams) -> None:
        """Check what sampling parameters alone do not know.

        Raises:
            SamplingParamsError: a token id is outside the vocabulary.
            UnsupportedFeatureError: a logits processor or a grammar that this engine does not have.
        """
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids:
                if token_id >= self.limits.vocab_size:
                    size = self.limits.vocab_size
                    raise SamplingParamsError(f"{name}: token id {token_id} is outside the vocabulary of {size} tokens")
        for name in params.logits_processors:
            if name not in self.limits.logits_processors:
                available = ", ".join(sorted(self.limits.logits_processors)) or "none"
                raise UnsupportedFeatureError(f"Unknown logits processor {name!r}. Available: {available}.")
        for name in ("json_schema", "regex", "ebnf"):
            if getattr(params, name) is not None:
                raise UnsupportedFeatureError(f"{name}: this engine has no grammar backend to enforce it")

    def request(
        self,
        request_id: str,
        prompt_token_ids: TokenIds,
        params: SamplingParams,
        *,
        index: int = 0,
        namespace: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Request:
        """Make the request of one completion.

        Args:
            prompt_token_ids: as `check_prompt` returned them.
            index: which of the prompt's `n` completions.
            seed: for all completions of the prompt; None takes the parameters' own, or draws one.
        """
        now = self._clock()
        base = params.seed if seed is None else seed
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=params,
            max_new_tokens=self._max_new_tokens(len(prompt_token_ids), params),
            stop_token_ids=frozenset(params.stop_token_ids).union(
                () if params.ignore_eos else self.limits.eos_token_ids
            ),
            seed=completion_seed(draw_seed() if base is None else base, index),
            arrival_s=now,
            namespace=namespace,
            priority=priority,
            deadline_s=None if timeout_s is None else now + timeout_s,
            stop_watch=self._make_stop_watch(params) if params.stop_strings else None,
        )

    def _max_new_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        """Bound the output by the context, and where the user left it open, by the memory."""
        room = self.limits.context_len - prompt_len
        if params.max_tokens is None:
            return max(1, min(room, self.limits.memory_tokens - prompt_len))
        return min(room, params.max_tokens)


def _as_array(token_ids: object) -> NDArray[Any]:
    """Return token ids as an integer array [n]."""
    try:
        prompt = np.asarray(token_ids)
    except (ValueError, OverflowError):
        prompt = np.empty(())  # ragged, or beyond any integer type
    if prompt.ndim == 1 and (prompt.dtype.kind in "iu" or not len(prompt)):
        return prompt
    raise InvalidPromptError(f"a prompt is text or a flat list of token ids, got {reprlib.repr(token_ids)}")


def draw_seed() -> int:
    """Return a seed nobody can foresee."""
    return secrets.randbelow(_MAX_SEED)


def completion_seed(seed: int, index: int) -> int:
    """Return the seed of a prompt's completion; the first one's is the prompt's own."""
    return (seed + index * 0x1E3779B97F4A7C15) % _MAX_SEED if index else seed
