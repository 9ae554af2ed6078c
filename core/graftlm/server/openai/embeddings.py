"""The route /v1/embeddings."""

import base64
from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from graftlm.pooling.embeddings import embedding_form
from graftlm.processes.generation import PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.openai.answers import EmbeddingBody, EmbeddingList, EmbeddingUsage, encode
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model
from graftlm.server.openai.prompts import split_prompts
from graftlm.server.openai.requests import EmbeddingRequest
from graftlm.server.pooled import pooled_vectors, prepare_pooled
from graftlm.server.sse import until_disconnect

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter()

    @router.post("/v1/embeddings", summary="Embed one text or several", responses=described(EmbeddingList))
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        return Response(await until_disconnect(request, _embed(manager, body)), media_type="application/json")

    return router


async def _embed(manager: TokenizerManager, body: EmbeddingRequest) -> bytes:
    adapter = check_model(body.model, manager.model, manager.adapters)
    form = embedding_form(manager.model.embedding, body.pooling, body.normalize, body.dimensions)
    options = RequestOptions(
        priority=body.priority or 0, cache_salt=body.cache_salt or "", adapter=adapter, pooling=form.pooling
    )
    prepared = await prepare_pooled(manager, split_prompts(body.input), options, keep_last=body.truncate_prompt_tokens)
    vectors = [form.finish(vector) for vector in await pooled_vectors(manager, prepared)]
    return _answer(manager, body, prepared, vectors)


def _answer(
    manager: TokenizerManager,
    body: EmbeddingRequest,
    prepared: Sequence[PreparedRequest],
    vectors: Sequence[NDArray[np.float32]],
) -> bytes:
    model = manager.model.id_with(prepared[0].options.adapter)
    num_tokens = sum(len(request.prompt_token_ids) for request in prepared)
    is_base64 = body.encoding_format == "base64"
    data = [EmbeddingBody(index=i, embedding=_encoded(vector, is_base64)) for i, vector in enumerate(vectors)]
    return encode(EmbeddingList(data=data, model=model, usage=EmbeddingUsage(num_tokens, num_tokens)))


def _encoded(vector: NDArray[np.float32], is_base64: bool) -> list[float] | str:
    vector = vector.astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
