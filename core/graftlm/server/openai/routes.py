"""OpenAI's API as one router."""

from fastapi import APIRouter, Response

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.openai import chat, classification, completions, embeddings, responses, scoring, tokens
from graftlm.server.openai.answers import ModelCard, ModelList, encode
from graftlm.server.openai.document import described
from graftlm.server.openai.params import check_model

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with all routes of OpenAI's API."""
    router = APIRouter(tags=["openai"], responses=ERROR_RESPONSES)
    for part in (chat, completions, responses, embeddings, scoring, classification, tokens):
        router.include_router(part.make_router(manager))

    @router.get("/v1/models", summary="The served models", responses=described(ModelList))
    async def list_models() -> Response:
        cards = [_card(manager, adapter) for adapter in (None, *manager.adapters)]
        return Response(encode(ModelList(data=cards)), media_type="application/json")

    @router.get("/v1/models/{model:path}", summary="A model, by its name", responses=described(ModelCard))
    async def get_model(model: str) -> Response:
        card = _card(manager, check_model(model, manager.model, manager.adapters))
        return Response(encode(card), media_type="application/json")

    return router


def _card(manager: TokenizerManager, name: str | None) -> ModelCard:
    """Return the card of the model with the adapter `name`; without an adapter if `name` is None."""
    model, adapter = manager.model, None if name is None else manager.adapters[name]
    return ModelCard(
        id=model.id_with(name),
        created=model.created_s if adapter is None else adapter.loaded_s,
        root=model.path if adapter is None else adapter.path,
        max_model_len=model.context_len,
        parent=None if adapter is None else model.name,
    )
