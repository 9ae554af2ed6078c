"""OpenAI's API as one router."""

from typing import Any

from fastapi import APIRouter

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.openai import chat, completions, embeddings, tokens
from graftlm.server.openai.params import check_model

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return the routes that OpenAI's clients know."""
    router = APIRouter(tags=["openai"], responses=ERROR_RESPONSES)
    for part in (chat, completions, embeddings, tokens):
        router.include_router(part.make_router(manager))
    described = {
        "id": manager.model.name,
        "object": "model",
        "created": manager.model.created_s,
        "owned_by": "graftlm",
        "root": manager.model.path,
        "max_model_len": manager.model.context_len,
    }

    @router.get("/v1/models", summary="The model that is served")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [described]}

    @router.get("/v1/models/{model:path}", summary="The model, by its name")
    async def get_model(model: str) -> dict[str, Any]:
        check_model(model, manager.model)
        return described

    return router
