"""The route /v1/classify, which returns the class probabilities of a score head, with vLLM's field names."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import Field

from graftlm.pooling.pooling import SCORES
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.openai.answers import ScoreUsage, encode, new_id, now_s
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model
from graftlm.server.openai.prompts import split_prompts
from graftlm.server.openai.requests import OpenAIModel, PromptsField
from graftlm.server.pooled import pooled_vectors, prepare_pooled
from graftlm.server.shared_fields import CacheSalt, IgnoredText, Priority
from graftlm.server.sse import until_disconnect
from graftlm.server.wire import Text

__all__ = ["make_router"]


class ClassificationRequest(OpenAIModel):
    """A request to classify texts."""

    known_at: ClassVar[str | None] = "/v1/classify"

    input: PromptsField = Field(description="Text or token ids, one input or several.")
    model: Text | None = Field(default=None, description="The model's name. Null: the served model.")
    use_activation: bool | None = Field(
        default=True,
        description="Convert scores to probabilities. If false, the unchanged output of the score head is returned.",
    )
    cache_salt: CacheSalt = None
    priority: Priority = 0
    user: IgnoredText = None


class ClassifiedText(msgspec.Struct, frozen=True):
    """The class of one text."""

    index: int
    label: str
    probs: Sequence[float]
    num_classes: int


class ClassificationList(msgspec.Struct, frozen=True, kw_only=True):
    """The classes, in the order of the texts."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: Sequence[ClassifiedText]
    usage: ScoreUsage


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the route of this module."""
    router = APIRouter()

    @router.post("/v1/classify", summary="Classify one text or several", responses=described(ClassificationList))
    async def classify(request: Request, body: ClassificationRequest) -> Response:
        return Response(await until_disconnect(request, _classify(manager, body)), media_type="application/json")

    return router


async def _classify(manager: TokenizerManager, body: ClassificationRequest) -> bytes:
    adapter = check_model(body.model, manager.model, manager.adapters)
    options = RequestOptions(
        priority=body.priority or 0, cache_salt=body.cache_salt or "", adapter=adapter, pooling=SCORES
    )
    prepared = await prepare_pooled(manager, split_prompts(body.input), options)
    vectors = await pooled_vectors(manager, prepared)
    num_tokens = sum(len(request.prompt_token_ids) for request in prepared)
    labels, activates = manager.model.labels, body.use_activation is not False
    data = [
        ClassifiedText(
            i, labels[int(scores.argmax())], (_probabilities(scores) if activates else scores).tolist(), len(scores)
        )
        for i, scores in enumerate(vectors)
    ]
    return encode(
        ClassificationList(
            id=new_id("classify"),
            created=now_s(),
            model=manager.model.id_with(adapter),
            data=data,
            usage=ScoreUsage(num_tokens, num_tokens),
        )
    )


def _probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the softmax of several scores, and the logistic function of a single one."""
    if len(scores) == 1:
        return np.asarray(1 / (1 + np.exp(-scores)), dtype=np.float32)
    powers = np.exp(scores - scores.max())
    return np.asarray(powers / powers.sum(), dtype=np.float32)
