"""The routes under /v1/responses."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ApiError, code_of, message_of
from graftlm.server.openai.answers import ContentToken, encode, new_item_id, now_s, unenforced_of
from graftlm.server.openai.document import described
from graftlm.server.openai.logprobs import chat_logprobs, shown_logprobs
from graftlm.server.openai.reasoning_tokens import num_reasoning_tokens
from graftlm.server.openai.responses.answers import (
    DeletedResponse,
    Incomplete,
    InputTokenCount,
    InputTokensDetails,
    ItemList,
    OutputTokensDetails,
    ResponseBody,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseFailure,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
)
from graftlm.server.openai.responses.conversion import RESPONSES_NAMES, chat_request
from graftlm.server.openai.responses.item_writer import ItemWriter
from graftlm.server.openai.responses.requests import InputItem, InputTokensRequest, PromptFields, ResponsesRequest
from graftlm.server.openai.responses.store import ResponseStore, StoredResponse, make_response_store
from graftlm.server.openai.started_chat import StartedChat, count_prompt_tokens, start_chat
from graftlm.server.openai.translated import fields_named
from graftlm.server.sse import EventFormat, EventStream, until_disconnect
from graftlm.types import FinishReason, TokenLogprob, Usage

__all__ = ["make_router"]

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_STREAM = "server-sent events, each with a name and a `sequence_number`"


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module."""
    router = APIRouter()
    store = make_response_store(manager.config.server.response_store)

    @router.post(
        "/v1/responses", summary="Continue a conversation", responses=described(ResponseBody, ResponseEvent, _STREAM)
    )
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        items = await _conversation(store, body)
        response_id = body.request_id or new_item_id("resp")
        with fields_named(RESPONSES_NAMES):
            chat_body = chat_request(body, _ITEMS.validate_python(items))
            chat = await until_disconnect(request, start_chat(manager, chat_body, response_id))
        answer = _Answer(manager, store, body, items, chat, _opened(body, response_id, chat))
        if body.stream:
            events = EventFormat(frame=bytes, error=answer.failed)
            return EventStream(answer.events(), close=chat.generation.abort, event_format=events)
        return _json(await until_disconnect(request, answer.whole()))

    @router.post(
        "/v1/responses/input_tokens", summary="Count the tokens of a prompt", responses=described(InputTokenCount)
    )
    async def count_input_tokens(body: InputTokensRequest) -> Response:
        items = await _conversation(store, body)
        with fields_named(RESPONSES_NAMES):
            count = await count_prompt_tokens(manager, chat_request(body, _ITEMS.validate_python(items)))
        return _json(InputTokenCount(input_tokens=count))

    @router.get("/v1/responses/{response_id}", summary="Return a stored response", responses=described(ResponseBody))
    async def get_response(response_id: str, stream: bool = False) -> Response:
        if stream:
            raise ApiError(400, "stream: a stored response is not streamed again", param="stream", code="unsupported")
        stored = await _stored(store, response_id)
        return Response(stored.body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", summary="Delete a response", responses=described(DeletedResponse))
    async def delete_response(response_id: str) -> Response:
        if not await store.delete(response_id):
            raise _not_found(response_id)
        return _json(DeletedResponse(id=response_id))

    @router.post("/v1/responses/{response_id}/cancel", summary="Refused: responses do not run in the background")
    async def cancel_response(response_id: str) -> Response:
        await _stored(store, response_id)
        raise ApiError(400, "only a response with background: true can be cancelled", code="unsupported")

    @router.get(
        "/v1/responses/{response_id}/input_items",
        summary="Return the conversation before a stored response",
        responses=described(ItemList),
    )
    async def list_input_items(
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
        after: str | None = None,
    ) -> Response:
        items = msgspec.json.decode((await _stored(store, response_id)).items)
        return _json(_page(items if order == "asc" else items[::-1], limit, after))

    return router


def _json(body: msgspec.Struct) -> Response:
    return Response(encode(body), media_type="application/json")


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"there is no stored response {response_id[:256]!r}", code="not_found")


async def _stored(store: ResponseStore, response_id: str) -> StoredResponse:
    stored = await store.get(response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


async def _conversation(store: ResponseStore, body: PromptFields) -> list[dict[str, Any]]:
    """Return the items of the previous response's conversation and output, followed by the request's own input.

    Raises:
        ApiError: 400, the previous response is not stored.
    """
    own: list[dict[str, Any]]
    if isinstance(body.input, str):
        own = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": body.input}]}]
    else:
        own = [item.model_dump(exclude_none=True) for item in body.input or ()]
    for item in own:
        item.setdefault("type", "message")
        item.setdefault("id", new_item_id("item"))
    if not body.previous_response_id:
        return own
    stored = await store.get(body.previous_response_id)
    if stored is None:
        message = f"previous_response_id: there is no stored response {body.previous_response_id!r}"
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    output = msgspec.json.decode(stored.body)["output"]
    return [*msgspec.json.decode(stored.items), *output, *own]


def _page(items: Sequence[Mapping[str, Any]], limit: int, after: str | None) -> ItemList:
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after: there is no item {after[:256]!r}", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return ItemList(data=page, first_id=first, last_id=last, has_more=len(items) > limit)


def _opened(body: ResponsesRequest, response_id: str, chat: StartedChat) -> ResponseBody:
    """Return the body of a response that has begun."""
    given = body.model_dump(
        include={"reasoning", "text", "tool_choice", "tools"}, exclude_none=True, by_alias=True, mode="json"
    )
    return ResponseBody(
        id=response_id,
        created_at=now_s(),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=chat.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": None, "summary": None} | given.get("reasoning", {}),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": {"type": "text"}} | given.get("text", {}),
        tool_choice=given.get("tool_choice", "auto"),
        tools=[{"description": None, "parameters": None, "strict": None} | tool for tool in given.get("tools", ())],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        unenforced=unenforced_of(chat.unenforced),
        user=body.user,
    )


def _event(event: ResponseEvent) -> bytes:
    """Return an event in SSE format, with its name."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))


@dataclass(frozen=True, slots=True)
class _Answer:
    """One response that is being generated.

    Attributes:
        items: the conversation before the response.
        opened: the response body without output.
    """

    manager: TokenizerManager
    store: ResponseStore
    body: ResponsesRequest
    items: Sequence[Mapping[str, Any]]
    chat: StartedChat
    opened: ResponseBody
    writer: ItemWriter = field(default_factory=ItemWriter)

    async def whole(self) -> ResponseBody:
        """Wait until the response is complete, and return it."""
        output = await self.chat.ended()
        (completion,), (reader,) = output.completions, self.chat.readers
        parts = reader.push(completion.text) + reader.finish(completion.finish_reason, completion.matched_stop)
        logprobs = self._logprobs(completion.logprobs or (), completion.matched_stop)
        for part in parts:
            for _ in self.writer.add(part, logprobs if part.content else ()):
                pass
            logprobs = () if part.content else logprobs
        for _ in self.writer.end(_item_status(completion.finish_reason)):
            pass
        return await self._ended(completion.finish_reason, output.usage)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events. If the iterator is closed early, the request is aborted."""
        writer, (reader,) = self.writer, self.chat.readers
        reason: FinishReason | None = None
        is_started = False
        async with aclosing(self.chat.deltas()) as stream:
            async for deltas in stream:
                if not is_started:
                    yield _event(ResponseCreated(writer.number(), self.opened))
                    yield _event(ResponseInProgress(writer.number(), self.opened))
                    is_started = True
                for delta in deltas:
                    parts = reader.push(delta.text)
                    if delta.finish_reason is not None:
                        parts += reader.finish(delta.finish_reason, delta.matched_stop)
                        reason = delta.finish_reason
                    logprobs = self._logprobs(delta.logprobs, delta.matched_stop)
                    for part in parts:
                        for event in writer.add(part, logprobs if part.content else ()):
                            yield _event(event)
                        logprobs = () if part.content else logprobs
        for event in writer.end(_item_status(reason)):
            yield _event(event)
        response = await self._ended(reason, self.chat.generation.gathered().usage)
        yield _event(_last_event(writer.number(), response))

    def failed(self, error: BaseException) -> bytes:
        """Return the last event of a stream that failed."""
        failure = ResponseFailure(code_of(error) or "server_error", message_of(error))
        response = msgspec.structs.replace(self.opened, status="failed", error=failure, output=self.writer.items)
        return _event(ResponseFailed(self.writer.number(), response))

    async def _ended(self, reason: FinishReason | None, usage: Usage) -> ResponseBody:
        """Return the completed response, and store it."""
        changes: dict[str, Any] = {"status": "completed", "completed_at": now_s()}
        if reason is FinishReason.LENGTH:
            changes = {"status": "incomplete", "incomplete_details": Incomplete("max_output_tokens")}
        elif reason is not FinishReason.STOP:
            changes = {"status": "failed", "error": ResponseFailure("server_error", "the request was aborted")}
        (reader,) = self.chat.readers
        num_reasoning = await num_reasoning_tokens(self.manager.preparer, reader.message().reasoning_content)
        counts = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(num_reasoning),
            usage.total_tokens,
        )
        response = msgspec.structs.replace(self.opened, **changes, output=self.writer.items, usage=counts)
        if response.store and response.status != "failed":
            await self.store.put(StoredResponse(response.id, encode(response), encode(self.items)))
        return response

    def _logprobs(self, logprobs: Sequence[TokenLogprob], matched_stop: str | int | None) -> Sequence[ContentToken]:
        shown = shown_logprobs(logprobs, matched_stop, keeps_stop=False)
        return chat_logprobs(self.manager.tokenizer, shown).content if shown else ()


def _last_event(number: int, response: ResponseBody) -> ResponseEvent:
    if response.status == "completed":
        return ResponseCompleted(number, response)
    return ResponseIncomplete(number, response) if response.status == "incomplete" else ResponseFailed(number, response)


def _item_status(reason: FinishReason | None) -> str:
    return "completed" if reason is FinishReason.STOP else "incomplete"
