r"""API speculative execution: several `gen`s of one state answered by one longer completion.

The state's text so far is the prompt of every call, so one rule covers constant text and `gen`s alike: a call's prompt
and its completion together are text that the model is known to write. A later `gen` whose prompt lies within that text
is answered by what follows there, up to its stop string.

    known    Name: Ana\nJob: cook\n
             |---------|            the first gen's prompt and answer; it was asked without its stop string "\n"
                      |-----|       constant text of the program, and equal: the guess holds
                             |--|   the second gen's answer, without a call
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from graftlm.lang.backend import Backend, Generation, GenerationRequest
from graftlm.lang.backends.usage import UsageMeter
from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Message

__all__ = ["SpeculativeBackend"]

#: With these, an answer is not what follows in any completion; nor does it tell what would.
_NEEDS_CALL = ("regex", "json_schema", "return_logprob", "stop_token_ids", "stop_regex", "min_tokens", "ignore_eos")

#: What the call says of itself, and has been told with the `gen` that it was made for.
_NOT_ASKED_FOR: Final = {
    "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "reasoning_content": "", "speculated": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Known:
    """What the model is known to write.

    Attributes:
        text: a call's prompt and its completion.
        prompt_len: characters of the prompt in it.
        has_ended: whether the model ended the text there by itself.
        sampling: of the call, without what only says where to end.
        meta_info: of the call.
    """

    text: str
    prompt_len: int
    has_ended: bool
    sampling: Sampling
    meta_info: dict[str, Any]

    def num_tokens(self, part: str) -> int:
        """Estimate the tokens of a part of the completion, of which an endpoint tells the sum at most."""
        total, length = self.meta_info.get("completion_tokens"), len(self.text) - self.prompt_len
        if not total or not length:
            return len(part.encode())  # it has no more: a token has a byte or more
        return -(-len(part) * int(total) // length)

    def answer(self, prompt: str, sampling: Sampling, max_tokens: int) -> Generation | None:
        """Return what follows a prompt up to its end; None where that cannot be told."""
        rest = self.text[len(prompt) :]
        found = [(at, stop) for stop in sampling.stop or () if (at := rest.find(stop)) >= 0]
        if not found and not self.has_ended:
            return None
        at, matched = min(found) if found else (len(rest), None)
        if self.num_tokens(rest[: at + len(matched or "")]) > max_tokens:
            return None  # its own call would have ended in here, at a token of which only the endpoint knows
        reason = {"type": "stop", "matched": matched}
        return Generation(rest[:at], self.meta_info | {"finish_reason": reason, "speculated": False})


class SpeculativeBackend:
    """One state's view of a backend. Not for several states: two that sample must not share what one of them drew.

    A `gen` that ends at a stop string is asked without it, and for more tokens. A guess that fails later costs
    nothing but those tokens: the `gen` makes its own call. The one case that costs a call is a first `gen` whose end
    cannot be told in its own longer completion; it is asked again as it stands, and from then on every `gen` is.
    """

    def __init__(self, backend: Backend, num_tokens: int, meter: UsageMeter, *, default_max_tokens: int) -> None:
        """Begin knowing nothing.

        Args:
            num_tokens: to ask for, where a `gen` alone would ask for fewer.
            meter: counts what is saved.
            default_max_tokens: of the backend, for a `gen` that names none.
        """
        self._backend = backend
        self._num_tokens = num_tokens
        self._default_max_tokens = default_max_tokens
        self._meter = meter
        self._known: _Known | None = None
        self._guesses = True

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Answer out of what is known, or by a call; see Backend."""
        if (known := self._from_known(request)) is not None:
            return [known]
        if not self._guesses or not _may_be_longer(request.sampling):
            return await self._backend.generate(request)
        return [await self._guess(request)]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Answer as `generate`, in one piece when that answers out of more text than was asked for; see Backend."""
        if (known := self._from_known(request)) is not None:
            yield known
        elif self._guesses and _may_be_longer(request.sampling):
            yield await self._guess(request)
        else:
            async with aclosing(self._backend.stream(request)) as generations:
                async for generation in generations:
                    yield generation

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return how likely each choice is; see Backend."""
        return await self._backend.score(prompt, choices, unconditional=unconditional, messages=messages)

    async def cache_prefix(self, prompt: str) -> None:
        """Have a prompt computed and cached; see Backend."""
        await self._backend.cache_prefix(prompt)

    async def chat_template(self) -> ChatTemplate:
        """Return how the model's chats are written; see Backend."""
        return await self._backend.chat_template()

    async def flush_cache(self) -> None:
        """Forget cached prefixes; see Backend."""
        await self._backend.flush_cache()

    def _from_known(self, request: GenerationRequest) -> Generation | None:
        known = self._known
        if known is None or len(request.prompt) >= len(known.text) or not known.text.startswith(request.prompt):
            return None
        if _needs_call(request.sampling) or _without_end(request.sampling) != known.sampling:
            return None
        answer = known.answer(request.prompt, request.sampling, self._max_tokens(request))
        if answer is None:
            return None
        prompt_tokens = known.meta_info.get("prompt_tokens", 0)
        self._meter.count_saved(prompt_tokens + known.num_tokens(request.prompt[known.prompt_len :]))
        return replace(answer, meta_info=answer.meta_info | _NOT_ASKED_FOR)

    async def _guess(self, request: GenerationRequest) -> Generation:
        """Ask for more than a request wants, and keep it."""
        sampling, max_tokens = request.sampling, self._max_tokens(request)
        longer = replace(sampling, stop=None, max_tokens=max(self._num_tokens, max_tokens))
        (whole,) = await self._backend.generate(replace(request, sampling=longer))
        has_ended = (whole.meta_info.get("finish_reason") or {}).get("type") == "stop"
        text = request.prompt + whole.text
        known = _Known(text, len(request.prompt), has_ended, _without_end(sampling), whole.meta_info)
        answer = known.answer(request.prompt, sampling, max_tokens)
        if answer is not None:
            self._known = known
            return answer
        if longer.max_tokens == max_tokens:
            return whole  # it is as long as wanted, and holds no stop string
        self._guesses = False
        (own,) = await self._backend.generate(request)
        return own

    def _max_tokens(self, request: GenerationRequest) -> int:
        wanted = request.sampling.max_tokens
        return self._default_max_tokens if wanted is None else wanted


def _may_be_longer(sampling: Sampling) -> bool:
    """Whether a longer completion tells where this `gen` ends in it: only a stop string does."""
    return bool(sampling.stop) and not _needs_call(sampling)


def _needs_call(sampling: Sampling) -> bool:
    return (sampling.n or 1) > 1 or any(getattr(sampling, name) for name in _NEEDS_CALL)


def _without_end(sampling: Sampling) -> Sampling:
    return replace(sampling, stop=None, max_tokens=None)
