r"""API speculative execution: one longer completion answers several `gen`s of one state.

The known text is a call's prompt followed by its completion. The prompt of a later `gen` is the state's text so far. If
the known text starts with this prompt, the part of the known text after the prompt, up to the `gen`'s stop string, is
the answer.

    known text  Name: Ana\nJob: cook\n
                |-------|              the first gen's prompt and answer; it was requested without its stop string "\n"
                         |-----|       constant text of the program; it is equal, so the known text remains usable
                                |--|   the second gen's answer, without a call

This needs greedy sampling, because a second request must give the same text. At higher temperatures, a sampled text may
lack the end of a `gen`. If such a text were sampled again, short texts would be favoured.
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

#: A `gen` with one of these parameters makes a separate call, because its answer is not part of another completion.
_NEEDS_CALL: Final = (
    "regex", "json_schema", "ebnf", "return_logprob", "stop_token_ids", "stop_regex", "min_tokens", "ignore_eos",
)  # fmt: skip

#: Penalties depend on the tokens that the same call has generated before, so a separate call would give another text.
_PENALTIES: Final = ("frequency_penalty", "presence_penalty")

#: Meta information of a `gen` without a call. The call's counts belong to the `gen` that made the call.
_WITHOUT_CALL: Final = {
    "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0, "reasoning_content": "", "speculated": True,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Known:
    """The known text of one call.

    Attributes:
        text: the call's prompt and its completion.
        prompt_len: number of characters of the prompt.
        has_ended: whether the model itself ended the completion.
        max_tokens: the call's limit of tokens.
        sampling: the call's sampling parameters without `stop` and `max_tokens`.
        meta_info: the call's meta information.
    """

    text: str
    prompt_len: int
    has_ended: bool
    max_tokens: int
    sampling: Sampling
    meta_info: dict[str, Any]

    def likely_tokens(self, part: str) -> int:
        """Estimate the number of tokens of a part of the completion, in proportion to its length."""
        total, length = self.meta_info.get("completion_tokens"), len(self.text) - self.prompt_len
        if not total or not length:
            return len(part.encode())
        return -(-len(part) * int(total) // length)

    def most_tokens(self, part: str) -> int:
        """Return an upper bound of a part's number of tokens: the smaller of its bytes and the completion's tokens."""
        total = self.meta_info.get("completion_tokens") or self.max_tokens
        return min(len(part.encode()), int(total), self.max_tokens)

    def answer(
        self, prompt: str, sampling: Sampling, max_tokens: int, *, is_estimate: bool = False
    ) -> Generation | None:
        """Return the text that follows a prompt, up to the end of the `gen`; None if its end is not in the known text.

        Args:
            is_estimate: whether to compare `max_tokens` with an estimate of the answer's number of tokens instead of an
                upper bound.
        """
        rest = self.text[len(prompt) :]
        found = [(at, stop) for stop in sampling.stop or () if (at := rest.find(stop)) >= 0]
        if not found and not self.has_ended:
            return None
        at, matched = min(found) if found else (len(rest), None)
        count = self.likely_tokens if is_estimate else self.most_tokens
        if count(rest[: at + len(matched or "")]) > max_tokens:
            return None  # max_tokens may end the gen within this text; only the endpoint can find the last token
        reason = {"type": "stop", "matched": matched}
        return Generation(rest[:at], self.meta_info | {"finish_reason": reason, "speculated": False})


class SpeculativeBackend:
    """A view of a backend for one state. Two states must not share it, because each must sample separate texts.

    A greedy `gen` with a stop string is requested without this string, and with more tokens. If a later text of the
    program differs from the known text, only these tokens are lost: the later `gen` makes a separate call. If the
    longer completion does not contain the end of the first `gen`, this costs one more call: the `gen` is requested
    again without speculation, and so is every later `gen`.

    Some chat endpoints can only write whole messages. Such a message is sampled once, at any temperature. No call can
    continue a part of such a message. If the message does not contain the end of a `gen`, a second request is made only
    if it is certain to give the same text; otherwise this is an error.
    """

    def __init__(
        self,
        backend: Backend,
        num_tokens: int,
        meter: UsageMeter,
        *,
        default_max_tokens: int,
        writes_whole_messages: bool = False,
        continues_text: bool = True,
    ) -> None:
        """Begin without known text.

        Args:
            num_tokens: number of tokens to request, if the `gen` requests fewer.
            meter: counts the saved calls and tokens.
            default_max_tokens: the backend's limit for a `gen` without `max_tokens`.
            writes_whole_messages: whether the backend can only write whole chat messages.
            continues_text: whether a request without messages is a text to continue. If it is a message to answer, it
                makes its own call.
        """
        self._backend = backend
        self._num_tokens = num_tokens
        self._default_max_tokens = default_max_tokens
        self._writes_whole_messages = writes_whole_messages
        self._continues_text = continues_text
        self._meter = meter
        self._known: _Known | None = None
        self._speculates = True

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Answer from the known text, or by a call; see Backend.

        Raises:
            RequestFailedError: the end of the `gen` is not in a sampled message.
        """
        if (known := self._from_known(request)) is not None:
            return [known]
        if not self._may_speculate(request):
            return await self._backend.generate(request)
        return [await self._request_longer(request)]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Answer like `generate`; text from the known text is yielded in one piece; see Backend."""
        if (known := self._from_known(request)) is not None:
            yield known
        elif self._may_speculate(request):
            yield await self._request_longer(request)
        else:
            async with aclosing(self._backend.stream(request)) as generations:
                async for generation in generations:
                    yield generation

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of each choice; see Backend."""
        return await self._backend.score(prompt, choices, unconditional=unconditional, messages=messages)

    async def cache_prefix(self, prompt: str) -> None:
        """Compute and cache a prompt; see Backend."""
        await self._backend.cache_prefix(prompt)

    async def chat_template(self) -> ChatTemplate:
        """Return the format of the model's chats; see Backend."""
        return await self._backend.chat_template()

    async def flush_cache(self) -> None:
        """Remove cached prefixes; see Backend."""
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
        return replace(answer, meta_info=answer.meta_info | _WITHOUT_CALL)

    async def _request_longer(self, request: GenerationRequest) -> Generation:
        """Request a longer completion than the `gen` needs, and store it as known text."""
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
            # Without `answer`, `whole` is the result: it has max_tokens tokens and no stop string.
            return answer or whole
        self._check_may_ask_again(request)
        self._speculates = False
        (own,) = await self._backend.generate(request)
        return own

    def _may_speculate(self, request: GenerationRequest) -> bool:
        """Whether the end of this `gen` can be found in a longer completion; this needs a stop string."""
        sampling = request.sampling
        if not self._speculates or not sampling.stop or _needs_call(sampling):
            return False
        if not self._continues_text and not request.messages:
            return False
        return _is_certain(sampling) or (self._writes_whole_messages and bool(request.messages))

    def _is_part(self, request: GenerationRequest) -> bool:
        """Whether the request continues a partial message, which the endpoint can only write as a whole."""
        return self._writes_whole_messages and bool(request.messages) and bool(request.messages[-1]["content"])

    def _check_may_ask_again(self, request: GenerationRequest) -> None:
        if not _is_certain(request.sampling):
            raise RequestFailedError(
                "the model's message ended before the text of this gen was complete, and sampling the text again "
                "would favour short texts; raise num_api_spec_tokens, or max_tokens of the first gen in the "
                "message, or use temperature=0"
            )

    def _max_tokens(self, request: GenerationRequest) -> int:
        max_tokens = request.sampling.max_tokens
        return self._default_max_tokens if max_tokens is None else max_tokens


def _needs_call(sampling: Sampling) -> bool:
    return (sampling.n or 1) > 1 or any(getattr(sampling, name) for name in _NEEDS_CALL)


def _is_certain(sampling: Sampling) -> bool:
    """Whether the text is the same if it is generated in one call or in several calls."""
    return sampling.temperature == 0 and not any(getattr(sampling, name) for name in _PENALTIES)


def _without_end(sampling: Sampling) -> Sampling:
    return replace(sampling, stop=None, max_tokens=None)
