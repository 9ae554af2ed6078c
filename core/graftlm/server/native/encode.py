"""The route /encode, which returns embeddings, with SGLang's field names."""

import time
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from graftlm.errors import InvalidPromptError
from graftlm.pooling.embeddings import embedding_form
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.native.responses import ClassifyMeta
from graftlm.server.pooled import pooled_vectors, prepare_pooled
from graftlm.server.shared_fields import CacheSalt, Name, Priority
from graftlm.server.sse import until_disconnect
from graftlm.server.wire import WHOLE, OneOrMany, OneOrManyPrompts, Text, WireModel

__all__ = ["make_router"]


class EncodeRequest(WireModel):
    """A request to embed one or several texts."""

    known_at: ClassVar[str | None] = "/encode"

    text: OneOrMany[Text] | None = Field(default=None, description="The text or texts, if `input_ids` is not given.")
    input_ids: OneOrManyPrompts | None = Field(
        default=None, description="The text or texts as token ids, instead of `text`."
    )
    rid: OneOrMany[Name] | None = Field(
        default=None, description="The request's id, one for each text. Null: the server creates the ids."
    )
    priority: Priority = None
    cache_salt: CacheSalt = None
    lora_path: Name | None = Field(
        default=None, description="The name of a loaded adapter. Null: the model without an adapter."
    )
    model: Text | None = Field(
        default=None, description="Accepted without effect: the server has one model, and `lora_path` names an adapter."
    )
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1), WHOLE] | None = Field(
        default=None,
        description="Return only this number of elements at the start of each vector, for models that are trained for "
        "it. Null: all elements.",
    )


class EncodeBody(BaseModel):
    """The vector of a text."""

    model_config = ConfigDict(extra="forbid")

    embedding: list[float]
    meta_info: ClassifyMeta


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter(tags=["generate"], responses={status: ERROR_RESPONSES[status] for status in (400, 429, 503)})

    @router.post("/encode", summary="Embed one text or several, as /v1/embeddings does")
    async def encode(request: Request, body: EncodeRequest) -> EncodeBody | list[EncodeBody]:
        given: Any = body.text if body.input_ids is None else body.input_ids
        answers = await until_disconnect(request, _encode(manager, body, given))
        return answers if isinstance(given, list) else answers[0]

    return router


async def _encode(manager: TokenizerManager, body: EncodeRequest, given: Any) -> list[EncodeBody]:
    start_s = time.monotonic()
    if (body.text is None) == (body.input_ids is None):
        raise InvalidPromptError("give the input as either text or input_ids")
    prompts = given if isinstance(given, list) else [given]
    ids: list[str | None] = [*body.rid] if isinstance(body.rid, list) else [body.rid] * len(prompts)
    if not prompts or len(ids) != len(prompts) or (body.rid is not None and len(set(ids)) < len(ids)):
        raise InvalidPromptError(f"rid: give a different one for each of {len(prompts)} prompt(s), and a prompt")
    form = embedding_form(manager.model.embedding, None, None, body.dimensions)
    options = RequestOptions(
        priority=body.priority or 0, cache_salt=body.cache_salt or "", adapter=body.lora_path, pooling=form.pooling
    )
    prepared = await prepare_pooled(manager, prompts, options, ids)
    vectors = [form.finish(vector) for vector in await pooled_vectors(manager, prepared)]
    latency_s = round(time.monotonic() - start_s, 6)
    metas = [
        ClassifyMeta(id=it.request_id, prompt_tokens=len(it.prompt_token_ids), e2e_latency=latency_s) for it in prepared
    ]
    return [EncodeBody(embedding=vector.tolist(), meta_info=meta) for vector, meta in zip(vectors, metas, strict=True)]
