"""The route /generate, which answers prompts as a whole or as a stream."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import CompletionDelta, Generation, PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES, grammar_of
from graftlm.server.interleave import interleave
from graftlm.server.native.answers import AnswerWriter
from graftlm.server.native.prompts import NativePrompt, is_list, split_request
from graftlm.server.native.requests import GenerateRequest
from graftlm.server.native.responses import AnswerBody
from graftlm.server.output_room import check_output_room
from graftlm.server.sse import EventStream, until_disconnect

__all__ = ["make_router"]

T = TypeVar("T")


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter(
        tags=["generate"], responses={status: ERROR_RESPONSES[status] for status in (400, 404, 408, 429, 503)}
    )

    @router.post(
        "/generate",
        summary="Generate from one prompt or several",
        response_model=AnswerBody | list[AnswerBody],
        response_description="One answer. For a list of prompts, or with `n` above 1, a list of answers. With "
        "`stream`, server-sent events: each event is an answer with the complete output so "
        "far, and the last event is `[DONE]`.",
    )
    @router.put("/generate", summary="As POST", include_in_schema=False)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        if body.stream:
            call = await until_disconnect(request, _Call.start(manager, body))
            events = call.events()
            await anext(events)
            return EventStream(events)
        answers = await until_disconnect(request, _answers(manager, body))
        return Response(msgspec.json.encode(answers), media_type="application/json")

    @router.post("/concate_and_append_request", summary="Accepted without effect", include_in_schema=False)
    async def concatenate() -> dict[str, bool]:
        # SGLang's frontend calls this route after it has joined the texts of forks. Nothing has to be done, because the
        # next request contains the joined text, and the tokens of the forks are in the prefix cache.
        return {"success": True}

    return router


async def _answers(manager: TokenizerManager, body: GenerateRequest) -> dict[str, Any] | list[dict[str, Any]]:
    call = await _Call.start(manager, body)
    return await call.answers()


async def _prepare(manager: TokenizerManager, prompt: NativePrompt) -> PreparedRequest:
    with grammar_of(prompt.grammar_field):
        prepared = await manager.prepare(prompt.prompt, prompt.params, prompt.options, request_id=prompt.request_id)
    num_prompt = len(prepared.prompt_token_ids)
    check_output_room(manager, num_prompt, prompt.given_max_tokens, "sampling_params.max_new_tokens")
    return prepared


class _Call:
    """One running call of /generate, with an answer writer for each prompt."""

    def __init__(
        self,
        manager: TokenizerManager,
        generations: Sequence[Generation],
        writers: Sequence[AnswerWriter],
        grammar_fields: Sequence[str | None],
        many: bool,
    ) -> None:
        self._manager = manager
        self._generations = generations
        self._writers = writers
        self._fields = grammar_fields
        self._many = many
        #: Prompt index -> index of its first completion among the completions of all prompts.
        self._first = list(accumulate((len(g.completion_ids) for g in generations), initial=0))

    @classmethod
    async def start(cls, manager: TokenizerManager, body: GenerateRequest) -> "_Call":
        """Check and queue all prompts of a request. If one is refused, none is queued.

        Raises:
            RequestError: a prompt or its parameters are not valid.
            UnavailableError: no replica accepts requests.
        """
        started_s = time.perf_counter()
        prompts = split_request(body)
        requests = await asyncio.gather(*[_prepare(manager, prompt) for prompt in prompts])
        text = _token_text(manager) if body.return_text_in_logprobs else None
        writers = [
            AnswerWriter(
                prompt,
                request,
                lambda: time.perf_counter() - started_s,
                text,
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        many = is_list(body) or any(prompt.params.n > 1 for prompt in prompts)
        fields = [prompt.grammar_field for prompt in prompts]
        return cls(manager, await manager.start_all(requests), writers, fields, many)

    async def answers(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Wait until all prompts have ended and return their answers. Cancelling the call aborts them."""
        try:
            outputs = [await _ended(*pair) for pair in zip(self._generations, self._fields, strict=True)]
            answers = []
            for writer, output, generation in zip(self._writers, outputs, self._generations, strict=True):
                answers += await self._write(writer, partial(writer.answers, output, generation.weight_version))
            return answers if self._many else answers[0]
        finally:
            self._abort()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield b"" once, then the growing answers as JSON. Closing the generator aborts unfinished prompts."""
        try:
            yield b""  # closing a generator that has not started would not run the `finally` below
            streams = [_deltas(*pair) for pair in zip(self._generations, self._fields, strict=True)]
            async for i, deltas in interleave(streams):
                writer, generation = self._writers[i], self._generations[i]
                output = generation.gathered()
                for index in dict.fromkeys(delta.index for delta in deltas):
                    answer = await self._write(writer, partial(writer.answer, output, index, generation.weight_version))
                    if self._many:
                        answer["index"] = self._first[i] + index
                    yield msgspec.json.encode(answer)
        finally:
            self._abort()

    async def _write(self, writer: AnswerWriter, write: Callable[[], T]) -> T:
        """Call `write`, which writes answers; in another thread if it may decode the texts of thousands of tokens."""
        return await self._manager.preparer.in_thread(write) if writer.has_token_texts else write()

    def _abort(self) -> None:
        for generation in self._generations:
            generation.abort()


async def _ended(generation: Generation, grammar_field: str | None) -> GatheredOutput:
    """Wait for a generation's end, and return its output. Raises the errors of `grammar_of`."""
    with grammar_of(grammar_field):
        return await generation.ended()


async def _deltas(generation: Generation, grammar_field: str | None) -> AsyncGenerator[list[CompletionDelta], None]:
    """Yield the new parts of a generation's output. Raises the errors of `grammar_of`."""
    with grammar_of(grammar_field):
        async for deltas in generation:
            yield deltas


def _token_text(manager: TokenizerManager) -> Callable[[int], str]:
    """Return a function that decodes a token id, with a cache."""
    return lru_cache(maxsize=None)(lambda token_id: manager.tokenizer.decode([token_id], skip_special_tokens=False))
