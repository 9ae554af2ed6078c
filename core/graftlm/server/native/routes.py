"""The native API as one router."""

from fastapi import APIRouter

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.native import adapters, cache, control, generate, info

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return the routes that SGLang's clients and routers know."""
    router = APIRouter()
    for part in (generate, info, control, cache, adapters):
        router.include_router(part.make_router(manager))
    return router
