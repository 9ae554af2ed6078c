"""Sends the requests of a dialect, and counts the calls."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from graftlm.errors import UnavailableError, UnsupportedFeatureError
from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.backends.openai.choices import MAX_PATH_TOKENS, TokenNumbers, path_scores
from graftlm.lang.backends.openai.dialects import Dialect
from graftlm.lang.backends.openai.fields import call_tokens, choices_of
from graftlm.lang.backends.request_limit import RequestLimit
from graftlm.lang.backends.server_events import started
from graftlm.lang.backends.usage import UsageMeter
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Message

__all__ = ["Calls", "Transport"]


class Transport(Protocol):
    """Sends requests in OpenAI's form to one API. A coroutine that fails raises a `graftlm.errors.GraftlmError`.

    Attributes:
        url: the API's address, for error messages.
    """

    url: str

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request, in OpenAI's form."""

    def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the events of the answer to a streamed request, in OpenAI's form."""


class Calls:
    """The calls of one backend: at most `max_requests` are active; they are repeated while the API's queue is full."""

    def __init__(self, transport: Transport, meter: UsageMeter, max_requests: int) -> None:
        self._transport = transport
        self._meter = meter
        self._limit = RequestLimit(max_requests)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request, and count its tokens.

        Raises:
            EngineError: the answer has no list of choices.
        """
        async with self._limit.permit():
            answer = await self._limit.retry(lambda: self._transport.post(path, body))
        choices_of(answer)
        tokens = call_tokens(answer)
        self._meter.count_call(tokens.prompt, tokens.completion)
        return answer

    async def generate(self, dialect: Dialect, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        answer = await self.post(dialect.path, dialect.body(request))
        return dialect.generations(request, answer)

    async def stream(self, dialect: Dialect, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt; yields the growing completion; see Backend."""
        body = dialect.body(request) | {"stream": True, "stream_options": {"include_usage": True}}
        if dialect.written(request):  # the beginning of the answer must be compared before text is yielded
            (whole,) = await self.generate(dialect, request)
            yield whole
            return
        growing, generation = dialect.growing(), Generation("")
        async with self._limit.permit():
            event, rest = await self._limit.retry(lambda: started(self._transport.events(dialect.path, body)))
            async with aclosing(rest):
                generation = dialect.grown(request, growing, event)
                yield generation
                async for event in rest:
                    generation = dialect.grown(request, growing, event)
                    yield generation
        if generation.meta_info["finish_reason"] is None:
            raise UnavailableError(f"{self._transport.url} ended a stream before its text was complete")
        self._meter.count_call(growing.tokens.prompt, growing.tokens.completion)

    async def path_scores(
        self, dialect: Dialect, prompt: str, choices: Sequence[str], messages: Sequence[Message]
    ) -> list[ChoiceScore]:
        """Return the scores of the choices' first tokens, along one answer at temperature 0.

        Raises:
            UnsupportedFeatureError: the endpoint reports no log-probabilities.
        """
        sampling = Sampling(
            max_tokens=min(max(len(choice) for choice in choices), MAX_PATH_TOKENS),
            temperature=0.0,
            return_logprob=True,
            top_logprobs_num=dialect.max_top_logprobs,
        )
        (answer,) = await self.generate(dialect, GenerationRequest(prompt, sampling, tuple(messages)))
        tokens, top = answer.meta_info["output_token_logprobs"], answer.meta_info["output_top_logprobs"]
        if not tokens or len(top) != len(tokens):
            raise UnsupportedFeatureError(
                "select: this endpoint reports no log-probabilities; use gen and compare its text with the choices"
            )
        return path_scores(choices, tokens, top, TokenNumbers())
