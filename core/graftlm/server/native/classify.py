"""The route /classify, which scores texts with the model's score head."""

import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray

from graftlm.errors import InvalidPromptError
from graftlm.pooling.pooling import SCORES
from graftlm.processes.generation import PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.prompts import Prompt
from graftlm.request_options import RequestOptions
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.native.requests import ClassifyRequest
from graftlm.server.native.responses import ClassifyBody, ClassifyMeta
from graftlm.server.pooled import pooled_vectors, prepare_pooled
from graftlm.server.sse import until_disconnect

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter(tags=["generate"], responses={status: ERROR_RESPONSES[status] for status in (400, 429, 503)})

    @router.post("/classify", summary="Score one text or several with the model's score head")
    async def classify(request: Request, body: ClassifyRequest) -> ClassifyBody | list[ClassifyBody]:
        answers = await until_disconnect(request, _classify(manager, body))
        return answers if _is_list(body) else answers[0]

    return router


async def _classify(manager: TokenizerManager, body: ClassifyRequest) -> list[ClassifyBody]:
    start_s = time.monotonic()
    prompts = _prompts(body)
    ids: list[str | None] = [*body.rid] if isinstance(body.rid, list) else [body.rid] * len(prompts)
    if len(ids) != len(prompts) or (body.rid is not None and len(set(ids)) < len(ids)):
        raise InvalidPromptError(f"rid: give a different id for each of the {len(prompts)} prompt(s)")
    options = RequestOptions(
        priority=body.priority or 0, cache_salt=body.cache_salt or "", adapter=body.lora_path, pooling=SCORES
    )
    prepared = await prepare_pooled(manager, prompts, options, ids)
    vectors = await pooled_vectors(manager, prepared)
    latency_s = time.monotonic() - start_s
    return [_body(manager, *each, latency_s) for each in zip(prepared, vectors, strict=True)]


def _body(
    manager: TokenizerManager, request: PreparedRequest, scores: NDArray[np.float32], latency_s: float
) -> ClassifyBody:
    meta = ClassifyMeta(
        id=request.request_id, prompt_tokens=len(request.prompt_token_ids), e2e_latency=round(latency_s, 6)
    )
    return ClassifyBody(embedding=scores.tolist(), label=manager.model.labels[int(scores.argmax())], meta_info=meta)


def _is_list(body: ClassifyRequest) -> bool:
    if body.text is not None:
        return isinstance(body.text, list)
    return isinstance(body.input_ids, list)


def _prompts(body: ClassifyRequest) -> list[Prompt]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidPromptError("give the input as either text or input_ids")
    value: Any = body.input_ids if body.text is None else body.text
    prompts: list[Prompt] = list(value) if _is_list(body) else [value]
    if not prompts:
        raise InvalidPromptError("the list of prompts is empty; give at least one")
    return prompts
