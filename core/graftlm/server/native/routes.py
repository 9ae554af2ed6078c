"""The native API as one router."""

from fastapi import APIRouter

from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.native import adapters, cache, classify, control, encode, generate, info, memory, parsing, weights

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with all routes of the native API."""
    router = APIRouter()
    for part in (generate, classify, encode, info, parsing, control, cache, memory, weights, adapters):
        router.include_router(part.make_router(manager))
    return router
