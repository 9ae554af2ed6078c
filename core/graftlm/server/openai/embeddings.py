"""/v1/embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Final

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from graftlm.embeddings import POOLED, normalized
from graftlm.errors import RequestFailedError
from graftlm.processes.generation import Generation, PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.openai.answers import EmbeddingBody, EmbeddingList, EmbeddingUsage, encode
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model
from graftlm.server.openai.prompts import split_prompts
from graftlm.server.openai.requests import EmbeddingRequest
from graftlm.server.sse import until_disconnect

__all__ = ["make_router"]

#: Prompts of one call that wait or run.
_MAX_AT_ONCE: Final = 256


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/embeddings", summary="Embed one text or several", responses=described(EmbeddingList))
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        return Response(await until_disconnect(request, _embed(manager, body)), media_type="application/json")

    return router


async def _embed(manager: TokenizerManager, body: EmbeddingRequest) -> bytes:
    adapter = check_model(body.model, manager.model, manager.adapters)
    prepared = await asyncio.gather(
        *[
            manager.prepare(
                prompt,
                POOLED,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                pooling=body.pooling or "mean",
                adapter=adapter,
            )
            for prompt in split_prompts(body.input)
        ]
    )
    return _answer(manager, body, prepared, await _vectors(manager, prepared))


async def _vectors(manager: TokenizerManager, prepared: Sequence[PreparedRequest]) -> list[NDArray[np.float32]]:
    """Return a vector for each prompt; one that fails ends the others.

    Clients send thousands of texts in one call: no more of them wait at a time than leaves room for other clients.
    """
    room = asyncio.Semaphore(min(_MAX_AT_ONCE, manager.config.scheduling.max_queued_requests))

    async def vector(request: PreparedRequest) -> NDArray[np.float32]:
        async with room:
            return await _vector(await manager.start(request))

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(vector(request)) for request in prepared]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _vector(generation: Generation) -> NDArray[np.float32]:
    try:
        await generation.result()
    finally:
        generation.abort()
    if generation.embedding is None:
        raise RequestFailedError("the request was aborted before it had an embedding")
    return np.frombuffer(generation.embedding, dtype=np.float32)


def _answer(
    manager: TokenizerManager,
    body: EmbeddingRequest,
    prepared: Sequence[PreparedRequest],
    vectors: Sequence[NDArray[np.float32]],
) -> bytes:
    model = manager.model.id_with(prepared[0].adapter)
    num_tokens = sum(len(request.prompt_token_ids) for request in prepared)
    data = [EmbeddingBody(index=i, embedding=_written(vector, body)) for i, vector in enumerate(vectors)]
    return encode(EmbeddingList(data=data, model=model, usage=EmbeddingUsage(num_tokens, num_tokens)))


def _written(vector: NDArray[np.float32], body: EmbeddingRequest) -> list[float] | str:
    vector = (normalized(vector) if body.normalize is not False else vector).astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
