"""/v1/embeddings."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from graftlm.embeddings import POOLED, normalized
from graftlm.errors import RequestFailedError
from graftlm.processes.generation import Generation
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.openai.answers import encode
from graftlm.server.openai.params import check_model
from graftlm.server.openai.prompts import split_prompts
from graftlm.server.openai.requests import EmbeddingRequest
from graftlm.server.sse import until_disconnect

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return the route."""
    router = APIRouter()

    @router.post("/v1/embeddings", summary="Embed one text or several")
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        return Response(await until_disconnect(request, _embed(manager, body)), media_type="application/json")

    return router


async def _embed(manager: TokenizerManager, body: EmbeddingRequest) -> bytes:
    check_model(body.model, manager.model)
    prepared = await asyncio.gather(
        *[
            manager.prepare(
                prompt,
                POOLED,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                pooling=body.pooling or "mean",
            )
            for prompt in split_prompts(body.input)
        ]
    )
    generations = await manager.start_all(prepared)
    try:
        vectors = [await _vector(generation) for generation in generations]
    finally:
        for generation in generations:
            generation.abort()
    return _answer(manager, body, generations, vectors)


async def _vector(generation: Generation) -> NDArray[np.float32]:
    await generation.result()
    if generation.embedding is None:
        raise RequestFailedError("the request was aborted before it had an embedding")
    return np.frombuffer(generation.embedding, dtype=np.float32)


def _answer(
    manager: TokenizerManager,
    body: EmbeddingRequest,
    generations: Sequence[Generation],
    vectors: Sequence[NDArray[np.float32]],
) -> bytes:
    num_tokens = sum(len(generation.request.prompt_token_ids) for generation in generations)
    data = [
        {"object": "embedding", "index": i, "embedding": _written(vector, body)} for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return encode({"object": "list", "data": data, "model": manager.model.name, "usage": usage})


def _written(vector: NDArray[np.float32], body: EmbeddingRequest) -> Any:
    vector = (normalized(vector) if body.normalize is not False else vector).astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
