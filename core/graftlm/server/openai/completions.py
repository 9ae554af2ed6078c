"""The route /v1/completions."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from graftlm.processes.generation import CompletionDelta, Generation
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.cache_namespace import namespace_of
from graftlm.server.errors import grammar_of
from graftlm.server.interleave import interleave
from graftlm.server.openai.answers import (
    Completion,
    CompletionChoice,
    UsageBody,
    encode,
    finish_name,
    new_id,
    now_s,
    shows,
    sum_usage,
    unenforced_of,
)
from graftlm.server.openai.document import described
from graftlm.server.openai.logprobs import CompletionLogprobs
from graftlm.server.openai.params import completion_params, grammar_field, request_adapter
from graftlm.server.openai.prompts import split_prompts
from graftlm.server.openai.requests import CompletionRequest
from graftlm.server.output_room import check_output_room
from graftlm.server.sse import EventStream, until_disconnect
from graftlm.types import Completion as RawCompletion
from graftlm.types import PromptLogprobs, TokenLogprob

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter()

    @router.post(
        "/v1/completions", summary="Complete one prompt or several", responses=described(Completion, Completion)
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        answer = _Answer(manager, body)
        generations = await until_disconnect(request, answer.start())
        if body.stream:
            return EventStream(answer.events(generations), close=lambda: _abort(generations))
        return Response(await until_disconnect(request, answer.whole(generations)), media_type="application/json")

    return router


class _Answer:
    """The answer to one call. The completions are in the order of their prompts."""

    def __init__(self, manager: TokenizerManager, body: CompletionRequest) -> None:
        self._manager = manager
        self._body = body
        self._id = body.request_id or new_id("cmpl")
        self._created = now_s()
        self._n = body.n or 1
        self._grammar_field = grammar_field(body)
        self._model = manager.model.name

    async def start(self) -> list[Generation]:
        """Check and queue all prompts. If one is refused, none is queued.

        Raises:
            GraftlmError: a prompt is not valid, or is refused.
        """
        body, manager = self._body, self._manager
        adapter = request_adapter(body, manager.model, manager.adapters)
        self._model = manager.model.id_with(adapter)
        params = completion_params(body)
        options = RequestOptions(
            priority=body.priority or 0,
            timeout_s=body.timeout_s,
            cache_salt=namespace_of(body.cache_salt, body.extra_key),
            adapter=adapter,
        )
        prompts = split_prompts(body.prompt)
        with grammar_of(self._grammar_field):
            prepared = await asyncio.gather(
                *[
                    manager.prepare(
                        prompt,
                        params,
                        options,
                        request_id=self._id if len(prompts) == 1 else f"{self._id}-{i}",
                        keep_last=body.truncate_prompt_tokens,
                    )
                    for i, prompt in enumerate(prompts)
                ]
            )
        given = body.max_tokens if "max_tokens" in body.model_fields_set else None
        for request in prepared:
            check_output_room(manager, len(request.prompt_token_ids), given, "max_tokens")
        return await manager.start_all(prepared)

    async def whole(self, generations: Sequence[Generation]) -> bytes:
        """Wait until the requests have ended and return the body. Cancelling the call aborts them."""
        try:
            with grammar_of(self._grammar_field):
                outputs = [await generation.ended() for generation in generations]
        finally:
            _abort(generations)
        echoes = await self._echoes(generations)
        choices = [
            self._choice(i * self._n + completion.index, completion, output.prompt_logprobs, generations[i], echo)
            for i, (output, echo) in enumerate(zip(outputs, echoes, strict=True))
            for completion in output.completions
        ]
        unenforced = unenforced_of(generations[0].request.unenforced)
        return self._body_of(choices, sum_usage([output.usage for output in outputs]), unenforced)

    async def events(self, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
        """Yield the events. Closing the generator early aborts the requests."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        try:
            echoes = await self._echoes(generations)
            pieces = [_Pieces(self._manager, self._body, g, e) for g, e in zip(generations, echoes, strict=True)]
            # If usage is requested only for the end, it is null in the other events, as in OpenAI's answers.
            usage: UsageBody | msgspec.UnsetType | None = None if with_usage else msgspec.UNSET
            with grammar_of(self._grammar_field):
                async for i, deltas in interleave(generations):
                    if continuous:
                        usage = sum_usage([g.usage for g in generations])
                    for delta in deltas:
                        if shows(delta):
                            yield self._body_of([pieces[i].choice(i * self._n + delta.index, delta)], usage)
            if with_usage:
                yield self._body_of([], sum_usage([g.gathered().usage for g in generations]))
        finally:
            _abort(generations)

    async def _echoes(self, generations: Sequence[Generation]) -> list[str]:
        """Return the text at the start of the answers to each prompt: the prompt if `echo` is set, else ""."""
        if not self._body.echo:
            return [""] * len(generations)
        ids = [generation.request.prompt_token_ids for generation in generations]
        skips = self._body.skip_special_tokens is not False
        return [await self._manager.preparer.decode(prompt, skip_special_tokens=skips) for prompt in ids]

    def _choice(
        self,
        index: int,
        completion: RawCompletion,
        prompt_logprobs: PromptLogprobs | None,
        generation: Generation,
        echo: str,
    ) -> CompletionChoice:
        logprobs = None
        if completion.logprobs is not None:
            token_ids = list(completion.token_ids)
            values: list[TokenLogprob | None] = list(completion.logprobs)
            if prompt_logprobs is not None:
                token_ids = [*generation.request.prompt_token_ids.tolist(), *token_ids]
                values = [*prompt_logprobs, *values]
            logprobs = _logprobs(self._manager, self._body).write(token_ids, values)
        reason = finish_name(completion.finish_reason)
        return CompletionChoice(index, echo + completion.text, logprobs, reason, completion.matched_stop)

    def _body_of(
        self,
        choices: list[CompletionChoice],
        usage: UsageBody | msgspec.UnsetType | None,
        unenforced: Sequence[str] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        model, made = self._model, self._created
        body = Completion(id=self._id, created=made, model=model, choices=choices, usage=usage, unenforced=unenforced)
        return encode(body)


class _Pieces:
    """The parts of one prompt's completions in a stream. The first part of each completion begins with `echo`."""

    def __init__(self, manager: TokenizerManager, body: CompletionRequest, generation: Generation, echo: str) -> None:
        self._generation = generation
        self._echo = echo
        self._echoes = bool(body.echo)
        self._has_logprobs = body.logprobs is not None
        self._logprobs = [_logprobs(manager, body) for _ in generation.completion_ids]
        self._begun: set[int] = set()

    def choice(self, index: int, delta: CompletionDelta) -> CompletionChoice:
        """Return the choice to send for one delta."""
        is_first = delta.index not in self._begun
        self._begun.add(delta.index)
        text = self._echo + delta.text if is_first else delta.text
        logprobs = None
        if self._has_logprobs:
            token_ids, values = list(delta.token_ids), list(delta.logprobs)
            if is_first and self._echoes:
                token_ids = [*self._generation.request.prompt_token_ids.tolist(), *token_ids]
                values = [*(self._generation.gathered().prompt_logprobs or ()), *values]  # type: ignore[list-item]
            logprobs = self._logprobs[delta.index].write(token_ids, values)
        if delta.finish_reason is None:
            return CompletionChoice(index, text, logprobs)
        return CompletionChoice(index, text, logprobs, finish_name(delta.finish_reason), delta.matched_stop)


def _logprobs(manager: TokenizerManager, body: CompletionRequest) -> CompletionLogprobs:
    return CompletionLogprobs(manager.tokenizer, skips_special=body.skip_special_tokens is not False)


def _abort(generations: Sequence[Generation]) -> None:
    for generation in generations:
        generation.abort()
