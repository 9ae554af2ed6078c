r"""API speculative execution: several `gen`s of one state answered by one longer completion.

The state's text so far is the prompt of every call, so one rule covers constant text and `gen`s alike: a call's prompt
and its completion together are text that the model is known to write. A later `gen` whose prompt lies within that text
is answered by what follows there, up to its stop string.

    known    Name: Ana\nJob: cook\n
             |---------|            the first gen's prompt and answer; it was asked without its stop string "\n"
                      |-----|       constant text of the program, and equal: the guess holds
                             |--|   the second gen's answer, without a call

This is for greedy sampling, where asking again gives the same text. A draw at a higher temperature must stand: whether
it tells where a `gen` ends depends on what was drawn, so asking again where it does not would favour short texts.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from graftlm.errors import RequestFailedError
from graftlm.lang.backend import Backend, Generation, GenerationRequest
from graftlm.lang.backends.usage import UsageMeter
from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Message

__all__ = ["SpeculativeBackend"]

#: With these, an answer is not what follows in any completion; nor does it tell what would.
_NEEDS_CALL: Final = (
    "regex", "json_schema", "return_logprob", "stop_token_ids", "stop_regex", "min_tokens", "ignore_eos",
)  # fmt: skip

#: These count the tokens that a call has written before. A call of its own would begin to count anew.
_PENALTIES: Final = ("frequency_penalty", "presence_penalty")

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
        max_tokens: that the call might have had.
        sampling: of the call, without what only says where to end.
        meta_info: of the call.
    """

    text: str
    prompt_len: int
    has_ended: bool
    max_tokens: int
    sampling: Sampling
    meta_info: dict[str, Any]

    def likely_tokens(self, part: str) -> int:
        """Estimate the tokens of a text by its share of the completion's."""
        total, length = self.meta_info.get("completion_tokens"), len(self.text) - self.prompt_len
        if not total or not length:
            return len(part.encode())
        return -(-len(part) * int(total) // length)

    def most_tokens(self, part: str) -> int:
        """Return what no part of the completion exceeds: its bytes, as a token has one or more, and all tokens."""
        total = self.meta_info.get("completion_tokens") or self.max_tokens
        return min(len(part.encode()), int(total), self.max_tokens)

    def answer(
        self, prompt: str, sampling: Sampling, max_tokens: int, *, is_estimate: bool = False
    ) -> Generation | None:
        """Return what follows a prompt up to its end; None where that cannot be told.

        Args:
            is_estimate: tokens are counted as is likely; otherwise, an answer surely has no more than `max_tokens`.
        """
        rest = self.text[len(prompt) :]
        found = [(at, stop) for stop in sampling.stop or () if (at := rest.find(stop)) >= 0]
        if not found and not self.has_ended:
            return None
        at, matched = min(found) if found else (len(rest), None)
        count = self.likely_tokens if is_estimate else self.most_tokens
        if count(rest[: at + len(matched or "")]) > max_tokens:
            return None  # its own call may end in here, at a token of which only the endpoint knows
        reason = {"type": "stop", "matched": matched}
        return Generation(rest[:at], self.meta_info | {"finish_reason": reason, "speculated": False})


class SpeculativeBackend:
    """One state's view of a backend. Not for several states: two that sample must not share what one of them drew.

    A greedy `gen` that ends at a stop string is asked without it, and for more tokens. A guess that fails later costs
    nothing but those tokens: the `gen` makes its own call. The one case that costs a call is a first `gen` whose end
    cannot be told in its own longer completion; it is asked again as it stands, and from then on every `gen` is.

    A message of a chat that the endpoint writes from its beginning is drawn once, at any temperature. No call could go
    on with a part of it, so a `gen` whose end the message does not tell is an error unless asking again is certain to
    give the same.
    """

    def __init__(
        self,
        backend: Backend,
        num_tokens: int,
        meter: UsageMeter,
        *,
        default_max_tokens: int,
        writes_whole_messages: bool = False,
    ) -> None:
        """Begin knowing nothing.

        Args:
            num_tokens: to ask for, where a `gen` alone would ask for fewer.
            meter: counts what is saved.
            default_max_tokens: of the backend, for a `gen` that names none.
            writes_whole_messages: the backend cannot go on with a message of a chat that is there in part.
        """
        self._backend = backend
        self._num_tokens = num_tokens
        self._default_max_tokens = default_max_tokens
        self._writes_whole_messages = writes_whole_messages
        self._meter = meter
        self._known: _Known | None = None
        self._guesses = True

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Answer out of what is known, or by a call; see Backend.

        Raises:
            RequestFailedError: a sampled message ends before the `gen` does.
        """
        if (known := self._from_known(request)) is not None:
            return [known]
        if not self._may_guess(request):
            return await self._backend.generate(request)
        return [await self._guess(request)]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Answer as `generate`, in one piece when that answers out of more text than was asked for; see Backend."""
        if (known := self._from_known(request)) is not None:
            yield known
        elif self._may_guess(request):
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
        known, is_part = self._known, self._is_part(request)
        if known is None or not known.text.startswith(request.prompt):
            return None
        if _needs_call(request.sampling) or _without_end(request.sampling) != known.sampling:
            return None
        if not is_part and not _is_certain(request.sampling):
            return None
        answer = known.answer(request.prompt, request.sampling, self._max_tokens(request), is_estimate=is_part)
        if answer is None or len(request.prompt) == len(known.text):
            self._check_may_ask_again(request)
            return None
        prompt_tokens = known.meta_info.get("prompt_tokens", 0)
        self._meter.count_saved(prompt_tokens + known.likely_tokens(request.prompt[known.prompt_len :]))
        return replace(answer, meta_info=answer.meta_info | _NOT_ASKED_FOR)

    async def _guess(self, request: GenerationRequest) -> Generation:
        """Ask for more than a request wants, and keep it."""
        sampling, max_tokens, is_part = request.sampling, self._max_tokens(request), self._is_part(request)
        is_longer = is_part or _is_certain(sampling)
        num_asked = max(self._num_tokens, max_tokens) if is_longer else max_tokens
        longer = replace(sampling, stop=None, max_tokens=num_asked)
        (whole,) = await self._backend.generate(replace(request, sampling=longer))
        has_ended = (whole.meta_info.get("finish_reason") or {}).get("type") == "stop"
        text = request.prompt + whole.text
        known = _Known(text, len(request.prompt), has_ended, num_asked, _without_end(sampling), whole.meta_info)
        answer = known.answer(request.prompt, sampling, max_tokens, is_estimate=is_part)
        if answer is not None or num_asked == max_tokens:
            self._known = known
            return answer or whole  # which is as long as wanted, and holds no stop string
        self._check_may_ask_again(request)
        self._guesses = False
        (own,) = await self._backend.generate(request)
        return own

    def _may_guess(self, request: GenerationRequest) -> bool:
        """Whether a longer completion tells where this `gen` ends in it: only a stop string does."""
        sampling = request.sampling
        if not self._guesses or not sampling.stop or _needs_call(sampling):
            return False
        return _is_certain(sampling) or (self._writes_whole_messages and bool(request.messages))

    def _is_part(self, request: GenerationRequest) -> bool:
        """Whether only a whole message can answer, which begins with the part of it that is there."""
        return self._writes_whole_messages and bool(request.messages) and bool(request.messages[-1]["content"])

    def _check_may_ask_again(self, request: GenerationRequest) -> None:
        if not _is_certain(request.sampling):
            raise RequestFailedError(
                "the model's message does not tell where this gen ends, and another draw would favour messages that "
                "do; ask for longer ones with num_api_spec_tokens, or with max_tokens of the gen that begins the "
                "message, or take temperature=0"
            )

    def _max_tokens(self, request: GenerationRequest) -> int:
        wanted = request.sampling.max_tokens
        return self._default_max_tokens if wanted is None else wanted


def _needs_call(sampling: Sampling) -> bool:
    return (sampling.n or 1) > 1 or any(getattr(sampling, name) for name in _NEEDS_CALL)


def _is_certain(sampling: Sampling) -> bool:
    """Whether text behind a prompt is the same in every call, also in one that wrote a part of that prompt."""
    return sampling.temperature == 0 and not any(getattr(sampling, name) for name in _PENALTIES)


def _without_end(sampling: Sampling) -> Sampling:
    return replace(sampling, stop=None, max_tokens=None)
