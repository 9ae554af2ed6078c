"""The routes /v1/score and /v1/rerank."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from graftlm.errors import RequestError
from graftlm.pooling.pooling import SCORES, Pooling
from graftlm.pooling.scoring import Piece, joined, listed, relevance, relevance_pooling, scores_of, scoring_pooling
from graftlm.processes.generation import PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.prompts import Prompt, TextPair
from graftlm.request_options import RequestOptions
from graftlm.server.errors import ApiError
from graftlm.server.openai.answers import (
    DocumentBody,
    RankedDocument,
    Ranking,
    ScoreBody,
    ScoreList,
    ScoreUsage,
    encode,
)
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model
from graftlm.server.openai.scoring_requests import RerankRequest, ScoreRequest
from graftlm.server.pooled import pooled_vectors, prepare_pooled
from graftlm.server.sse import until_disconnect

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module. Each also has the paths that clients of other servers use."""
    router = APIRouter()

    @router.post("/v1/score", summary="Score pairs of texts, or items for a query", responses=described(ScoreList))
    @router.post("/score", include_in_schema=False)
    async def score(request: Request, body: ScoreRequest) -> Response:
        return _json(await until_disconnect(request, _score(manager, body)))

    @router.post("/v1/rerank", summary="Sort documents by their relevance", responses=described(Ranking))
    @router.post("/rerank", include_in_schema=False)
    @router.post("/v2/rerank", include_in_schema=False)
    async def rerank(request: Request, body: RerankRequest) -> Response:
        return _json(await until_disconnect(request, _rerank(manager, body)))

    return router


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Scored:
    """The model's output for some prompts.

    Attributes:
        model: name of the model in the answer.
        prepared: the prompts.
        vectors: one vector per prompt, float32 [n].
    """

    model: str
    prepared: Sequence[PreparedRequest]
    vectors: Sequence[NDArray[np.float32]]

    @property
    def usage(self) -> ScoreUsage:
        num_tokens = sum(len(request.prompt_token_ids) for request in self.prepared)
        return ScoreUsage(num_tokens, num_tokens)


async def _run(
    manager: TokenizerManager,
    body: ScoreRequest | RerankRequest,
    prompts: Sequence[Prompt | TextPair],
    pooling: Pooling,
) -> _Scored:
    adapter = check_model(body.model, manager.model, manager.adapters)
    options = RequestOptions(
        priority=body.priority or 0, cache_salt=body.cache_salt or "", adapter=adapter, pooling=pooling
    )
    prepared = await prepare_pooled(manager, prompts, options)
    return _Scored(manager.model.id_with(adapter), prepared, await pooled_vectors(manager, prepared))


async def _score(manager: TokenizerManager, body: ScoreRequest) -> bytes:
    check_model(body.model, manager.model, manager.adapters)
    given = [name for name in ("text_1", "text_2", "query", "items") if getattr(body, name) is not None]
    if given == ["text_1", "text_2"]:
        return await _score_pairs(manager, body)
    if given == ["query", "items"]:
        return await _score_items(manager, body)
    raise RequestError(f"give text_1 and text_2, or query and items; got {', '.join(given) or 'none of them'}")


async def _score_pairs(manager: TokenizerManager, body: ScoreRequest) -> bytes:
    """Return an answer in vLLM's format, with one score per pair."""
    pooling = relevance_pooling(body.label_token_ids)
    pairs = _pairs(_listed(body.text_1), _listed(body.text_2))
    scored = await _run(manager, body, [_joined(*pair, pooling) for pair in pairs], pooling)
    use_activation = body.use_activation is not False
    data = [
        ScoreBody(index=i, score=relevance(vector, pooling, use_activation=use_activation))
        for i, vector in enumerate(scored.vectors)
    ]
    return encode(_score_list(scored, data=data))


async def _score_items(manager: TokenizerManager, body: ScoreRequest) -> bytes:
    """Return an answer in SGLang's format, with one score per item and label."""
    pooling = scoring_pooling(body.label_token_ids)
    item_first = bool(body.item_first)
    query: Piece = [] if body.query is None else body.query
    pieces = [(item, query) if item_first else (query, item) for item in listed(body.items or [])]
    scored = await _run(manager, body, [_joined(*pair, pooling) for pair in pieces], pooling)
    scores = [scores_of(vector, pooling, apply_softmax=bool(body.apply_softmax)) for vector in scored.vectors]
    return encode(_score_list(scored, scores=scores))


def _score_list(
    scored: _Scored, data: list[ScoreBody] | None = None, scores: list[list[float]] | None = None
) -> ScoreList:
    return ScoreList(
        id=f"score-{uuid.uuid4().hex}",
        object="list" if scores is None else "scoring",
        created=int(time.time()),
        model=scored.model,
        data=data,
        scores=scores,
        usage=scored.usage,
    )


async def _rerank(manager: TokenizerManager, body: RerankRequest) -> bytes:
    check_model(body.model, manager.model, manager.adapters)
    pooling = relevance_pooling(body.label_token_ids)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    prompts = [_rerank_prompt(body, text, pooling) for text in texts]
    scored = await _run(manager, body, prompts, pooling)
    use_activation = body.use_activation is not False
    relevances = [relevance(vector, pooling, use_activation=use_activation) for vector in scored.vectors]
    ranked = sorted(range(len(texts)), key=lambda i: -relevances[i])[: body.top_n]
    has_documents = body.return_documents is not False
    results = [
        RankedDocument(
            index=i, relevance_score=relevances[i], document=DocumentBody(text=texts[i]) if has_documents else None
        )
        for i in ranked
    ]
    return encode(Ranking(id=f"rerank-{uuid.uuid4().hex}", model=scored.model, results=results, usage=scored.usage))


def _rerank_prompt(body: RerankRequest, text: str, pooling: Pooling) -> Prompt | TextPair:
    template = body.prompt_template
    if template is None:
        return _joined(body.query, text, pooling)
    if "{document}" not in template:
        raise ApiError(400, "prompt_template must contain {document}", param="prompt_template")
    before, *rest = template.split("{document}")
    # "{query}" is replaced in each part before they are joined, so that a document may contain "{query}".
    return text.join([part.replace("{query}", body.query) for part in (before, *rest)])


def _joined(first: Piece, second: Piece, pooling: Pooling) -> Prompt | TextPair:
    """Return a pair as one prompt. If the model has a score head, the checkpoint's tokenizer joins two texts."""
    if pooling == SCORES and isinstance(first, str) and isinstance(second, str):
        return TextPair(first, second)
    return joined(first, second, item_first=False)


def _pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    if len(first) == 1:
        return [(first[0], text) for text in second]
    if len(first) != len(second):
        message = f"text_1 has {len(first)} texts and text_2 has {len(second)}; give one text_1, or one for each text_2"
        raise RequestError(message, param="text_1")
    return list(zip(first, second, strict=True))


def _listed(texts: str | Sequence[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())
