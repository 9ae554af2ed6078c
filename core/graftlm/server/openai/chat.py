"""The route /v1/chat/completions."""

from collections.abc import AsyncGenerator, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from graftlm.processes.generation import CompletionDelta, Generation
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.cache_namespace import namespace_of
from graftlm.server.errors import grammar_of
from graftlm.server.openai.answers import (
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    UsageBody,
    encode,
    new_id,
    now_s,
    sum_usage,
    unenforced_of,
)
from graftlm.server.openai.document import described
from graftlm.server.openai.logprobs import chat_logprobs
from graftlm.server.openai.message_reader import MessageReader
from graftlm.server.openai.params import request_adapter
from graftlm.server.openai.plan import NUM_LAST_TOKENS, plan_answer, settled
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.sse import EventStream, until_disconnect
from graftlm.types import Completion, SamplingParams, TokenIds, TokenLogprob

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a chat", responses=described(Chat, ChatChunk))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        answer = _Answer(manager, body)
        generation = await until_disconnect(request, answer.start())
        if body.stream:
            return EventStream(answer.events(generation), close=generation.abort)
        return Response(await until_disconnect(request, answer.whole(generation)), media_type="application/json")

    return router


class _Answer:
    """The answer to one chat request."""

    def __init__(self, manager: TokenizerManager, body: ChatRequest) -> None:
        self._manager = manager
        self._body = body
        self._id = body.request_id or new_id("chatcmpl")
        self._created = now_s()
        self._readers: list[MessageReader] = []
        self._unenforced: Sequence[str] = ()
        self._grammar_field: str | None = None
        self._model = manager.model.name

    async def start(self) -> Generation:
        """Check the request and queue it.

        Raises:
            GraftlmError: the request is not valid, or is refused.
        """
        body, manager = self._body, self._manager
        adapter = request_adapter(body, manager.model, manager.adapters)
        self._model = manager.model.id_with(adapter)
        plan = await plan_answer(body, manager)

        def adapt(token_ids: TokenIds) -> SamplingParams:
            nonlocal plan
            prompt_end = manager.tokenizer.decode(token_ids[-NUM_LAST_TOKENS:], skip_special_tokens=False)
            plan = settled(plan, prompt_end, manager.preparer.is_token)
            return plan.params

        self._grammar_field = plan.field
        options = RequestOptions(
            priority=body.priority or 0,
            timeout_s=body.timeout_s,
            cache_salt=namespace_of(body.cache_salt, body.extra_key),
            adapter=adapter,
        )
        with grammar_of(plan.field):
            prepared = await manager.prepare(
                plan.messages,
                plan.params,
                options,
                request_id=self._id,
                template_args=plan.template_args,
                adapt=adapt,
            )
        self._unenforced = plan.unenforced(prepared.unenforced)
        self._readers = [plan.reader() for _ in range(prepared.params.n)]
        return await manager.start(prepared)

    async def whole(self, generation: Generation) -> bytes:
        """Wait until the request has ended and return the body. Cancelling the call aborts the request."""
        try:
            with grammar_of(self._grammar_field):
                output = await generation.ended()
        finally:
            generation.abort()
        choices = [self._whole_choice(completion) for completion in output.completions]
        usage = sum_usage([output.usage])
        return encode(
            Chat(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                unenforced=unenforced_of(self._unenforced),
            )
        )

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Yield the events. Closing the generator early aborts the request."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        opening = Delta(role="assistant", content=None if self._body.tools else "")
        unopened = range(len(generation.completion_ids))  # completions whose opening event is not sent yet
        try:
            with grammar_of(self._grammar_field):
                async for deltas in generation:
                    # If usage is requested only for the end, it is null in the other events, as in OpenAI's answers.
                    usage = sum_usage([generation.usage]) if continuous else None if with_usage else msgspec.UNSET
                    for i in unopened:
                        yield self._chunk(ChatChunkChoice(i, opening), usage, self._unenforced)
                    unopened = range(0)
                    for delta in deltas:
                        for choice in self._choices(delta):
                            yield self._chunk(choice, usage)
            if with_usage:
                usage = sum_usage([generation.gathered().usage])
                model = self._model
                yield encode(ChatChunk(id=self._id, created=self._created, model=model, choices=(), usage=usage))
        finally:
            generation.abort()

    def _chunk(
        self,
        choice: ChatChunkChoice,
        usage: UsageBody | msgspec.UnsetType | None,
        unenforced: Sequence[str] = (),
    ) -> bytes:
        """Return an event with one choice, since many clients read only the first choice of an event."""
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=(choice,),
            usage=usage,
            unenforced=unenforced_of(unenforced),
        )
        return encode(chunk)

    def _whole_choice(self, completion: Completion) -> ChatChoice:
        reader = self._readers[completion.index]
        reader.push(completion.text)
        reader.finish(completion.finish_reason, completion.matched_stop)
        return ChatChoice(
            index=completion.index,
            message=reader.message(),
            logprobs=None if completion.logprobs is None else self._logprobs(completion.logprobs),
            finish_reason=reader.finish_name(completion.finish_reason, completion.matched_stop),
            matched_stop=completion.matched_stop,
        )

    def _choices(self, delta: CompletionDelta) -> list[ChatChunkChoice]:
        """Return the choices to send for one delta; none if all its text is held back."""
        reader, index = self._readers[delta.index], delta.index
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish(delta.finish_reason, delta.matched_stop)
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        if delta.finish_reason is None:
            parts = parts or ([Delta(content="")] if logprobs else [])
            return [ChatChunkChoice(index, part, None if i else logprobs) for i, part in enumerate(parts)]
        parts = parts or [Delta()]
        choices = [ChatChunkChoice(index, part, None if i else logprobs) for i, part in enumerate(parts)]
        finish = reader.finish_name(delta.finish_reason, delta.matched_stop)
        last = msgspec.structs.replace(choices[-1], finish_reason=finish, matched_stop=delta.matched_stop)
        return [*choices[:-1], last]

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> ChatLogprobs:
        return chat_logprobs(self._manager.tokenizer, logprobs)
