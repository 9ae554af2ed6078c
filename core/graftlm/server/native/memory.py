"""The native routes that release and resume memory, with the names of SGLang and of vLLM."""

from collections.abc import Collection
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Body, Depends, Query
from fastapi.responses import Response

from graftlm.processes.released_memory import TAGS
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.middleware import require_admin
from graftlm.server.native.requests import MemoryRequest, MemoryTag
from graftlm.server.native.responses import Done, Sleeping

__all__ = ["make_router"]

_ADMIN: Final = [Depends(require_admin)]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with these routes. All that have effects are for administrators."""
    router = APIRouter(tags=["memory"], responses={status: ERROR_RESPONSES[status] for status in (400, 403, 503)})

    @router.post(
        "/release_memory_occupation",
        summary="Release memory of every replica; refused while requests run",
        dependencies=_ADMIN,
    )
    async def release(body: Annotated[MemoryRequest | None, Body()] = None) -> Done:
        tags = _released(body.tags if body is not None else None)
        await manager.memory.release(tags, keep_weights=True, running="refuse")
        return Done(message=f"memory is released: {', '.join(tags)}")

    @router.post("/resume_memory_occupation", summary="Allocate released memory again", dependencies=_ADMIN)
    async def resume(body: Annotated[MemoryRequest | None, Body()] = None) -> Done:
        tags = _released(body.tags if body is not None else None)
        await manager.memory.resume(tags)
        return Done(message=f"memory is resumed: {', '.join(tags)}")

    @router.post(
        "/sleep", summary="Release the memory of keys, values and weights", dependencies=_ADMIN, response_class=Response
    )
    async def sleep(
        level: Annotated[
            int, Query(ge=1, le=2, description="1: /wake_up restores the weights; 2: the weights are dropped.")
        ] = 1,
        mode: Annotated[
            Literal["abort", "wait", "keep"],
            Query(
                description="The running requests: `abort` ends them, `wait` waits until they have ended, `keep` "
                "pauses them until /wake_up."
            ),
        ] = "abort",
    ) -> Response:
        await manager.memory.release(TAGS, keep_weights=level == 1, running=mode)
        return Response()

    @router.post("/wake_up", summary="Allocate released memory again", dependencies=_ADMIN, response_class=Response)
    async def wake_up(
        tags: Annotated[
            list[MemoryTag] | None, Query(max_length=16, description="As for /resume_memory_occupation; none: all.")
        ] = None,
    ) -> Response:
        await manager.memory.resume(_released(tags))
        return Response()

    @router.get("/is_sleeping", summary="Whether memory is released")
    async def is_sleeping() -> Sleeping:
        return Sleeping(is_sleeping=bool(manager.memory.tags))

    return router


def _released(tags: Collection[str] | None) -> list[str]:
    """Return the kinds of memory that a request names; all if it names none."""
    return [tag for tag in TAGS if tag in tags] if tags else list(TAGS)
