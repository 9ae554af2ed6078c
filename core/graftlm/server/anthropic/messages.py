"""The routes /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request, Response

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.anthropic.answers import (
    Event,
    MessageBody,
    MessageChange,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputDetails,
    Ping,
    TokenCount,
    encode_event,
)
from graftlm.server.anthropic.blocks import BlockWriter, ThinkingDisplay, blocks_of
from graftlm.server.anthropic.conversion import ANTHROPIC_NAMES, chat_request
from graftlm.server.anthropic.error_shape import ERROR_RESPONSES, error_event
from graftlm.server.anthropic.paths import COUNT_TOKENS_PATH, MESSAGES_PATH
from graftlm.server.anthropic.requests import CountTokensRequest, MessagesRequest, ThinkingBody
from graftlm.server.openai.answers import encode, new_item_id
from graftlm.server.openai.document import described
from graftlm.server.openai.reasoning_tokens import num_reasoning_tokens
from graftlm.server.openai.started_chat import StartedChat, count_prompt_tokens, start_chat
from graftlm.server.openai.translated import fields_named
from graftlm.server.sse import EventFormat, EventStream, until_disconnect
from graftlm.types import FinishReason, Usage

__all__ = ["make_router"]

_EVENTS = EventFormat(frame=bytes, error=error_event)


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module."""
    router = APIRouter(tags=["anthropic"], responses=ERROR_RESPONSES)

    @router.post(
        MESSAGES_PATH,
        summary="Answer a conversation",
        responses=described(MessageBody, Event, "server-sent events, each with a name"),
    )
    async def messages(request: Request, body: MessagesRequest) -> Response:
        message_id = body.request_id or new_item_id("msg")
        with fields_named(ANTHROPIC_NAMES):
            chat = await until_disconnect(request, start_chat(manager, chat_request(body), message_id, clips=True))
        answer = _Answer(manager, message_id, chat, _display(body.thinking), body.max_tokens)
        if body.stream:
            return EventStream(answer.events(), close=chat.generation.abort, event_format=_EVENTS)
        whole = await until_disconnect(request, answer.whole())
        return Response(encode(whole), media_type="application/json")

    @router.post(COUNT_TOKENS_PATH, summary="Count the tokens of a prompt", responses=described(TokenCount))
    async def count_tokens(body: CountTokensRequest) -> Response:
        with fields_named(ANTHROPIC_NAMES):
            count = await count_prompt_tokens(manager, chat_request(body))
        return Response(encode(TokenCount(count)), media_type="application/json")

    return router


def _display(thinking: ThinkingBody | None) -> ThinkingDisplay:
    if thinking is None:
        return ThinkingDisplay.TEXT
    if thinking.type == "disabled":
        return ThinkingDisplay.NONE
    return ThinkingDisplay.OMITTED if thinking.display == "omitted" else ThinkingDisplay.TEXT


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer that is being generated."""

    manager: TokenizerManager
    id: str
    chat: StartedChat
    display: ThinkingDisplay
    max_tokens: int

    async def whole(self) -> MessageBody:
        """Wait until the answer is complete, and return the message."""
        output = await self.chat.ended()
        (completion,), (reader,) = output.completions, self.chat.readers
        reader.push(completion.text)
        reader.finish(completion.finish_reason, completion.matched_stop)
        end = self._end(completion.finish_reason, completion.matched_stop)
        return MessageBody(
            id=self.id,
            model=self.chat.model,
            content=blocks_of(reader.message(), self.display),
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=await self._final_usage(output.usage),
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events. If the iterator is closed early, the request is aborted."""
        writer = BlockWriter(self.display)
        (reader,) = self.chat.readers
        end = MessageChange(None, None)
        is_started = False
        async with aclosing(self.chat.deltas()) as stream:
            async for deltas in stream:
                if not is_started:
                    start = MessageBody(
                        id=self.id, model=self.chat.model, content=(), usage=_usage(self.chat.generation.usage, 0)
                    )
                    yield encode_event(MessageStart(start)) + encode_event(Ping())
                    is_started = True
                for delta in deltas:
                    parts = reader.push(delta.text)
                    if delta.finish_reason is not None:
                        parts += reader.finish(delta.finish_reason, delta.matched_stop)
                        end = self._end(delta.finish_reason, delta.matched_stop)
                    for part in parts:
                        for event in writer.add(part):
                            yield encode_event(event)
        for event in writer.end():
            yield encode_event(event)
        usage = await self._final_usage(self.chat.generation.gathered().usage)
        yield encode_event(MessageDelta(end, usage)) + encode_event(MessageStop())

    def _end(self, reason: FinishReason | None, matched: str | int | None) -> MessageChange:
        (reader,) = self.chat.readers
        if reader.finish_name(reason, matched) == "tool_calls":
            return MessageChange("tool_use", None)
        if reason is FinishReason.STOP and isinstance(matched, str):
            return MessageChange("stop_sequence", matched)
        if reason is FinishReason.STOP:
            return MessageChange("end_turn", None)
        if reason is FinishReason.LENGTH:
            num_tokens = self.chat.generation.num_output_tokens
            is_cut = num_tokens < self.max_tokens  # the context was full before `max_tokens` was reached
            return MessageChange("model_context_window_exceeded" if is_cut else "max_tokens", None)
        return MessageChange(None if reason is None else reason.value, None)

    async def _final_usage(self, usage: Usage) -> MessageUsage:
        (reader,) = self.chat.readers
        thinking = await num_reasoning_tokens(self.manager.preparer, reader.message().reasoning_content)
        details = OutputDetails(thinking) if thinking else None
        return msgspec.structs.replace(_usage(usage, usage.completion_tokens), output_tokens_details=details)


def _usage(usage: Usage, num_output_tokens: int) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=num_output_tokens,
    )
