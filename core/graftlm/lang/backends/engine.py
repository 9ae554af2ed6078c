"""The backend for an engine in this process."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, Final, Protocol, runtime_checkable

from graftlm.errors import RequestFailedError, SamplingParamsError, UnsupportedFeatureError
from graftlm.lang.backend import Generation, GenerationRequest
from graftlm.lang.backends.meta_info import meta_info
from graftlm.lang.backends.request_limit import RequestLimit
from graftlm.lang.backends.scoring import ScoringBatch
from graftlm.lang.backends.stop_regex import (
    complete_until_match,
    is_engine_supported,
    keeps_matches,
    stream_until_match,
)
from graftlm.lang.chat_template import ChatTemplate
from graftlm.lang.choices import ChoiceScore
from graftlm.lang.sampling import Sampling
from graftlm.types import Completion, FinishReason, Message, RequestOutput, SamplingParams, TokenIds

__all__ = ["EngineBackend", "InProcessEngine"]

#: Fields of Sampling that SamplingParams has under the same name.
_SAME: Final = (
    "max_tokens", "min_tokens", "n", "stop", "stop_token_ids", "temperature", "top_p", "min_p", "frequency_penalty",
    "presence_penalty", "ignore_eos", "regex", "json_schema", "ebnf",
)  # fmt: skip


class EngineTokenizer(Protocol):
    """The methods of an engine's tokenizer that this backend uses."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""

    @property
    def prompt_prefix(self) -> str:
        """The text of the tokens that `encode` adds before each text."""

    def encode(self, text: str) -> TokenIds:
        """Return a text's token ids, with the tokens that the model needs before each prompt."""

    def decode(self, token_ids: Sequence[int] | TokenIds, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    def apply_chat_template(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return a chat as text."""


@runtime_checkable
class InProcessEngine(Protocol):
    """The methods of `graftlm.Engine` that this backend uses."""

    @property
    def config(self) -> Any:
        """The engine's configuration."""

    @property
    def tokenizer(self) -> Any:
        """The engine's tokenizer, an EngineTokenizer."""

    async def agenerate(
        self, prompts: Any, sampling_params: Any = None, *, image_data: Any = None, adapter: Any = None
    ) -> list[RequestOutput]:
        """Complete prompts. If the coroutine is cancelled, the prompts are aborted."""

    def astream(
        self, prompt: Any, sampling_params: Any = None, *, image_data: Any = None, adapter: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt, and yield growing outputs. If the generator is closed, the prompt is aborted."""

    async def acache_prefix(self, prompt: str, *, adapter: str | None = None) -> None:
        """Queue a prompt to be computed and cached."""

    def flush_cache(self) -> int:
        """Remove cached prefixes."""

    def stats(self) -> Any:
        """Return the engine's statistics, a dataclass."""


class EngineBackend:
    """Runs a program's requests on an engine in this process.

    Args:
        adapter: name of a loaded low-rank adapter, used for all requests; None: no adapter.
    """

    def __init__(self, engine: InProcessEngine, adapter: str | None = None) -> None:
        self._engine = engine
        self._adapter = adapter
        self._tokenizer: EngineTokenizer = engine.tokenizer
        self._max_requests: int = engine.config.scheduling.max_queued_requests
        self._limit = RequestLimit(self._max_requests)
        self._chat_template: ChatTemplate | None = None

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Complete a prompt; see Backend."""
        if not _is_supported(request.sampling):
            return await complete_until_match(self.stream, request)
        params = _params(request.sampling)
        if (n := params.n) > self._max_requests:
            raise SamplingParamsError(
                f"n={n}: this engine's queue has room for {self._max_requests} completions; lower n, or raise "
                "scheduling.max_queued_requests"
            )
        (output,) = await self._outputs([request.prompt], params, request.images)
        return [self._generation(output, completion, request.sampling) for completion in output.completions]

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[Generation, None]:
        """Complete a prompt; yields the growing completion; see Backend."""
        if not _is_supported(request.sampling):
            async with aclosing(stream_until_match(self.stream, request)) as generations:
                async for generation in generations:
                    yield generation
            return
        params = _params(request.sampling)
        async with self._limit.permit():
            output, rest = await self._limit.retry(
                lambda: _started(
                    self._engine.astream(
                        request.prompt, params, adapter=self._adapter, **_image_data(list(request.images))
                    )
                )
            )
            async with aclosing(rest):
                yield self._generation(output, output.completions[0], request.sampling)
                async for output in rest:
                    yield self._generation(output, output.completions[0], request.sampling)

    async def score(
        self, prompt: str, choices: Sequence[str], *, unconditional: bool, messages: Sequence[Message] = ()
    ) -> list[ChoiceScore]:
        """Return the log-probabilities of each choice; see Backend."""
        batch = await asyncio.to_thread(self._scoring_batch, prompt, choices, unconditional)
        params = [
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start)
            for start in batch.starts
        ]
        outputs = [
            output
            for i in range(0, len(params), self._max_requests)  # a larger batch would never fit into the queue
            for output in await self._outputs(
                batch.prompts[i : i + self._max_requests], params[i : i + self._max_requests]
            )
        ]
        rows = [
            [0.0 if t is None else t.logprob for t in (output.prompt_logprobs or ())[start:]]
            for output, start in zip(outputs, batch.starts, strict=True)
        ]
        return batch.scores(rows, [output.usage.cached_tokens for output in outputs])

    async def cache_prefix(self, prompt: str) -> None:
        """Compute and cache a prompt; see Backend."""
        async with self._limit.permit():
            await self._limit.retry(lambda: self._engine.acache_prefix(prompt, adapter=self._adapter))

    async def chat_template(self) -> ChatTemplate:
        """Return the checkpoint's chat template; see Backend."""
        if self._chat_template is None:
            if not self._tokenizer.has_chat_template:
                raise UnsupportedFeatureError("this checkpoint has no chat template; write the roles as text")
            self._chat_template = ChatTemplate(self._render, added_prefix=self._tokenizer.prompt_prefix)
        return self._chat_template

    async def image_marker(self) -> str:
        """Return the model's marker; see PictureBackend."""
        marker = getattr(self._engine, "image_marker", None)
        if not isinstance(marker, str):
            raise UnsupportedFeatureError("image: the engine's model cannot use pictures")
        return marker

    def get_server_info(self) -> dict[str, Any]:
        """Return the engine's configuration and its statistics."""
        return {"config": self._engine.config.model_dump(mode="json"), "stats": asdict(self._engine.stats())}

    async def flush_cache(self) -> None:
        """Remove cached prefixes; see Backend."""
        await asyncio.to_thread(self._engine.flush_cache)

    def _render(self, messages: Sequence[Message], opens_answer: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=opens_answer)

    def _scoring_batch(self, prompt: str, choices: Sequence[str], unconditional: bool) -> ScoringBatch:
        before = self._tokenizer.encode(prompt).tolist()
        whole = [self._tokenizer.encode(prompt + choice).tolist() for choice in choices]
        return ScoringBatch.of(choices, before, whole, unconditional)

    def _generation(self, output: RequestOutput, completion: Completion, sampling: Sampling) -> Generation:
        _check_ended_well(completion)
        if sampling.max_tokens == 0:
            completion = _without_output(completion)
        return Generation(completion.text, meta_info(output, completion, sampling, self._token_text))

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    async def _outputs(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | list[SamplingParams],
        images: Sequence[bytes] = (),
    ) -> list[RequestOutput]:
        async with self._limit.permit():
            outputs = await self._limit.retry(
                lambda: self._engine.agenerate(
                    list(prompts), params, adapter=self._adapter, **_image_data([list(images)] if images else [])
                )
            )
        for completion in (completion for output in outputs for completion in output.completions):
            _check_ended_well(completion)
        return outputs


def _image_data(images: list[Any]) -> dict[str, Any]:
    """Return the engine's argument for pictures; none without pictures."""
    return {"image_data": images} if images else {}


async def _started(
    outputs: AsyncGenerator[RequestOutput, None],
) -> tuple[RequestOutput, AsyncGenerator[RequestOutput, None]]:
    """Return a stream's first output and a generator of the other outputs.

    The first output shows that the request was accepted.
    """
    return await anext(outputs), outputs


def _is_supported(sampling: Sampling) -> bool:
    """Return whether the engine ends the text at `stop_regex` itself."""
    return not sampling.stop_regex or (keeps_matches(sampling) and is_engine_supported(sampling))


def _params(sampling: Sampling) -> SamplingParams:
    """Return the engine's parameters.

    Raises:
        RequestError: a value is out of range, or engines do not support it.
    """
    given = sampling.given()
    fields: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    _check_max_tokens(sampling.max_tokens)
    if sampling.max_tokens == 0:
        fields["max_tokens"] = 1  # an engine generates at least one token; `_without_output` removes it
    if sampling.top_k is not None and sampling.top_k != -1:
        fields["top_k"] = sampling.top_k
    if sampling.return_logprob:
        fields["logprobs"] = sampling.top_logprobs_num or 0
        if sampling.logprob_start_len is not None and sampling.logprob_start_len >= 0:
            fields["prompt_logprobs"] = fields["logprobs"]
            # As in SGLang, the token at logprob_start_len itself is reported without a log-probability.
            fields["prompt_logprobs_start"] = sampling.logprob_start_len + 1
    if sampling.stop_regex:
        fields |= {"stop_regex": sampling.stop_regex, "include_stop": True}
    return SamplingParams(**fields)


def _check_max_tokens(value: object) -> None:
    """Check `max_tokens`. The engine's own check would name 1 as the minimum, but programs may use 0."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise SamplingParamsError(f"max_tokens must be a whole number of at least 0, or None, got {value!r}")


def _without_output(completion: Completion) -> Completion:
    """Return a completion without tokens, as a server returns it for `max_new_tokens=0`.

    Its log-probabilities do not change; they belong to the token that would come next.
    """
    ended = None if completion.finish_reason is None else FinishReason.LENGTH
    return replace(completion, text="", token_ids=(), finish_reason=ended, matched_stop=None)


def _check_ended_well(completion: Completion) -> None:
    if completion.finish_reason is FinishReason.ERROR:
        raise RequestFailedError(f"the request failed while it ran: {completion.error}")
    if completion.finish_reason is FinishReason.ABORT:
        raise RequestFailedError("the request was aborted while it ran")
