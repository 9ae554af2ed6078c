"""The native routes that steer the engine: abort, flush, pause, profile."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request

from graftlm.errors import RequestError
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.middleware import require_operator
from graftlm.server.native.requests import AbortRequest, ContinueRequest, PauseRequest, ProfileRequest
from graftlm.server.native.responses import Done, FlushDone, ProfileStarted, TracesWritten

__all__ = ["make_router"]

_OPERATOR = [Depends(require_operator)]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return the routes that change what the engine does; all but the abort of single requests are an operator's."""
    router = APIRouter(tags=["control"], responses={status: ERROR_RESPONSES[status] for status in (400, 403, 503)})

    @router.post("/abort_request", summary="End requests; unknown ids are ignored")
    async def abort_request(request: Request, body: AbortRequest) -> Done:
        if body.abort_all:
            require_operator(request)
            manager.abort_all()
            return Done(message="every request is being ended")
        rids = body.rid if isinstance(body.rid, list) else [body.rid or ""]
        if not all(rids):
            raise RequestError("rid is missing: name a request, or set abort_all")
        for rid in rids:
            manager.abort(rid)
        return Done(message="those of the requests that are under way are being ended")

    @router.post(
        "/flush_cache", summary="Forget every cached prefix that no running request uses", dependencies=_OPERATOR
    )
    @router.get("/flush_cache", summary="As POST", dependencies=_OPERATOR, include_in_schema=False)
    async def flush_cache() -> FlushDone:
        return FlushDone(flushed_tokens=await manager.flush_cache())

    @router.post("/pause_generation", summary="Stop generating until /continue_generation", dependencies=_OPERATOR)
    async def pause_generation(body: PauseRequest | None = None) -> Done:
        mode = (body or PauseRequest()).mode
        await manager.pause(mode)
        return Done(message=f"generation is paused ({mode})")

    @router.post("/continue_generation", summary="Go on after /pause_generation", dependencies=_OPERATOR)
    async def continue_generation(body: Annotated[ContinueRequest | None, Body()] = None) -> Done:
        await manager.resume()
        return Done(message="generation goes on")

    @router.post("/start_profile", summary="Record a trace of the steps", dependencies=_OPERATOR)
    async def start_profile(body: ProfileRequest | None = None) -> ProfileStarted:
        wanted = body or ProfileRequest()
        folder = _profile_folder(manager.config.server.profile_dir, wanted.output_dir)
        await manager.calls.call_schedulers(
            "start_profile",
            output_dir=str(folder),
            num_steps=wanted.num_steps,
            activities=wanted.activities or ["CPU", "GPU"],
            with_stack=bool(wanted.with_stack),
            record_shapes=bool(wanted.record_shapes),
        )
        return ProfileStarted(output_dir=str(folder))

    @router.post("/stop_profile", summary="End the recording; answers with the traces' files", dependencies=_OPERATOR)
    async def stop_profile() -> TracesWritten:
        written = await manager.calls.call_schedulers("stop_profile")
        return TracesWritten(files=[file for files in written for file in files])

    return router


def _profile_folder(profile_dir: str, name: str | None) -> Path:
    """Return the folder for traces.

    Raises:
        RequestError: it is not inside `profile_dir`.
    """
    base = Path(profile_dir).expanduser().resolve()
    if not name:
        return base
    try:
        folder = (base / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in it, a part too long, links in a circle
        raise RequestError(f"output_dir {name!r} is no folder's name: {error}") from error
    if not folder.is_relative_to(base):
        raise RequestError(f"output_dir must name a folder inside server.profile_dir, got {name!r}")
    return folder
