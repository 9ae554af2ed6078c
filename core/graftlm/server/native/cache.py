"""The native routes of the prefix cache: pin, unpin, snapshot."""

from typing import Any

from fastapi import APIRouter, Depends

from graftlm.errors import RequestError
from graftlm.processes.generation import PreparedRequest
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.request_options import RequestOptions
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.middleware import require_operator
from graftlm.server.native.requests import PinRequest, PrefixRequest
from graftlm.server.native.responses import CacheSnapshots, Pinned, Unpinned
from graftlm.types import SamplingParams

__all__ = ["make_router"]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router for operators, since its routes concern the cached prefixes of all clients."""
    router = APIRouter(
        tags=["cache"],
        dependencies=[Depends(require_operator)],
        responses={status: ERROR_RESPONSES[status] for status in (400, 403, 404, 503)},
    )

    async def prefix(body: PrefixRequest) -> PreparedRequest:
        if (body.text is None) == (body.input_ids is None):
            raise RequestError("give the prefix as either text or input_ids")
        prompt = body.text if body.input_ids is None else body.input_ids
        options = RequestOptions(cache_salt=body.cache_salt or "", adapter=body.lora_path)
        return await manager.prepare("" if prompt is None else prompt, SamplingParams(max_tokens=1), options)

    def arguments(prefix: PreparedRequest) -> dict[str, Any]:
        prompt, options = prefix.key_token_ids.tobytes(), prefix.options
        return {"prompt": prompt, "cache_salt": options.cache_salt, "adapter": options.adapter}

    @router.post("/pin_prefix", summary="Pin the cached part of a prefix for some time")
    async def pin_prefix(body: PinRequest) -> Pinned:
        prepared = await prefix(body)
        pinned = await manager.calls.call_schedulers("pin", **arguments(prepared), ttl_s=body.ttl_s)
        return Pinned(pinned_tokens=pinned)

    @router.post("/unpin_prefix", summary="Remove a pin before it expires")
    async def unpin_prefix(body: PrefixRequest) -> Unpinned:
        prepared = await prefix(body)
        was_pinned = await manager.calls.call_schedulers("unpin", **arguments(prepared))
        return Unpinned(was_pinned=any(was_pinned))

    @router.get(
        "/cache_snapshot", summary="Return every node of every replica's prefix cache; steps are delayed until then"
    )
    async def cache_snapshot() -> CacheSnapshots:
        replicas: list[dict[str, Any]] = await manager.calls.call_schedulers("cache_snapshot")
        return CacheSnapshots(replicas=replicas)

    return router
