"""OpenAI's API as one router."""

from fastapi import APIRouter, Response

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.openai import chat, completions, embeddings, scoring, tokens
from graftlm.server.openai.answers import ModelCard, ModelList, encode
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return the routes that OpenAI's clients know."""
    router = APIRouter(tags=["openai"], responses=ERROR_RESPONSES)
    for part in (chat, completions, embeddings, scoring, tokens):
        router.include_router(part.make_router(manager))
    served = manager.model
    card = ModelCard(id=served.name, created=served.created_s, root=served.path, max_model_len=served.context_len)

    @router.get("/v1/models", summary="The model that is served", responses=described(ModelList))
    async def list_models() -> Response:
        return Response(encode(ModelList(data=[card])), media_type="application/json")

    @router.get("/v1/models/{model:path}", summary="The model, by its name", responses=described(ModelCard))
    async def get_model(model: str) -> Response:
        check_model(model, served)
        return Response(encode(card), media_type="application/json")

    return router
