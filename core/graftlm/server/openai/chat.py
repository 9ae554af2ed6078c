"""The route /v1/chat/completions."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from graftlm.processes.generation import CompletionDelta
from graftlm.processes.tokenizer_manager import TokenizerManager
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
from graftlm.server.openai.logprobs import chat_logprobs, shown_logprobs
from graftlm.server.openai.requests import ChatRequest
from graftlm.server.openai.started_chat import StartedChat, start_chat
from graftlm.server.sse import EventStream, until_disconnect
from graftlm.types import Completion, TokenLogprob

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a chat", responses=described(Chat, ChatChunk))
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        chat_id = body.request_id or new_id("chatcmpl")
        chat = await until_disconnect(request, start_chat(manager, body, chat_id))
        answer = _Answer(manager, body, chat_id, chat)
        if body.stream:
            return EventStream(answer.events(), close=chat.generation.abort)
        return Response(await until_disconnect(request, answer.whole()), media_type="application/json")

    return router


class _Answer:
    """The answer to one chat request."""

    def __init__(self, manager: TokenizerManager, body: ChatRequest, chat_id: str, chat: StartedChat) -> None:
        self._manager = manager
        self._body = body
        self._id = chat_id
        self._created = now_s()
        self._chat = chat

    async def whole(self) -> bytes:
        """Wait until the request has ended and return the body. Cancelling the call aborts the request."""
        output = await self._chat.ended()
        choices = [self._whole_choice(completion) for completion in output.completions]
        return encode(
            Chat(
                id=self._id,
                created=self._created,
                model=self._chat.model,
                choices=choices,
                usage=sum_usage([output.usage]),
                unenforced=unenforced_of(self._chat.unenforced),
            )
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events. Closing the generator early aborts the request."""
        options, generation = self._body.stream_options, self._chat.generation
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        opening = Delta(role="assistant", content=None if self._body.tools else "")
        unopened = range(len(generation.completion_ids))
        async with aclosing(self._chat.deltas()) as stream:
            async for deltas in stream:
                # If usage is requested only for the end, it is null in the other events, as in OpenAI's answers.
                usage = sum_usage([generation.usage]) if continuous else None if with_usage else msgspec.UNSET
                for i in unopened:
                    yield self._chunk(ChatChunkChoice(i, opening), usage, self._chat.unenforced)
                unopened = range(0)
                for delta in deltas:
                    for choice in self._choices(delta):
                        yield self._chunk(choice, usage)
        if with_usage:
            usage = sum_usage([generation.gathered().usage])
            model = self._chat.model
            yield encode(ChatChunk(id=self._id, created=self._created, model=model, choices=(), usage=usage))

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
            model=self._chat.model,
            choices=(choice,),
            usage=usage,
            unenforced=unenforced_of(unenforced),
        )
        return encode(chunk)

    def _whole_choice(self, completion: Completion) -> ChatChoice:
        reader = self._chat.readers[completion.index]
        reader.push(completion.text)
        reader.finish(completion.finish_reason, completion.matched_stop)
        return ChatChoice(
            index=completion.index,
            message=reader.message(),
            logprobs=None
            if completion.logprobs is None
            else self._logprobs(completion.logprobs, completion.matched_stop),
            finish_reason=reader.finish_name(completion.finish_reason, completion.matched_stop),
            matched_stop=completion.matched_stop,
        )

    def _choices(self, delta: CompletionDelta) -> list[ChatChunkChoice]:
        """Return the choices to send for one delta; none if all its text is held back."""
        reader, index = self._chat.readers[delta.index], delta.index
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish(delta.finish_reason, delta.matched_stop)
        logprobs = self._logprobs(delta.logprobs, delta.matched_stop) if delta.logprobs else None
        if delta.finish_reason is None:
            parts = parts or ([Delta(content="")] if logprobs else [])
            return [ChatChunkChoice(index, part, None if i else logprobs) for i, part in enumerate(parts)]
        parts = parts or [Delta()]
        choices = [ChatChunkChoice(index, part, None if i else logprobs) for i, part in enumerate(parts)]
        finish = reader.finish_name(delta.finish_reason, delta.matched_stop)
        last = msgspec.structs.replace(choices[-1], finish_reason=finish, matched_stop=delta.matched_stop)
        return [*choices[:-1], last]

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...], matched_stop: str | int | None) -> ChatLogprobs:
        keeps_stop = bool(self._body.include_stop_str_in_output)
        return chat_logprobs(self._manager.tokenizer, shown_logprobs(logprobs, matched_stop, keeps_stop=keeps_stop))
