"""The native routes that control the engine: abort, flush, pause, profile."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query, Request

from graftlm.errors import RequestError
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.server.errors import ERROR_RESPONSES
from graftlm.server.middleware import require_operator
from graftlm.server.native.requests import AbortRequest, ContinueRequest, PauseRequest, ProfileRequest
from graftlm.server.native.responses import Done, FlushDone, ProfileStarted, TracesWritten

__all__ = ["make_router"]

_OPERATOR = [Depends(require_operator)]


def make_router(manager: TokenizerManager) -> APIRouter:
    """Return a router with the routes of this module. All are for operators, except the abort of single requests."""
    router = APIRouter(tags=["control"], responses={status: ERROR_RESPONSES[status] for status in (400, 403, 503)})

    @router.post("/abort_request", summary="End requests; unknown ids are ignored")
    async def abort_request(request: Request, body: AbortRequest) -> Done:
        if body.abort_all:
            require_operator(request)
            manager.abort_all()
            return Done(message="every request is being aborted")
        rids = body.rid if isinstance(body.rid, list) else [body.rid or ""]
        if not all(rids):
            raise RequestError("rid is missing: give the id of a request, or set abort_all")
        for rid in rids:
            manager.abort(rid)
        return Done(message="waiting and running requests with these ids are being aborted")

    @router.post(
        "/flush_cache", summary="Remove every cached prefix that no running request uses", dependencies=_OPERATOR
    )
    @router.get("/flush_cache", summary="As POST", dependencies=_OPERATOR, include_in_schema=False)
    async def flush_cache() -> FlushDone:
        return FlushDone(flushed_tokens=await manager.flush_cache())

    @router.post("/reset_prefix_cache", summary="As /flush_cache, with vLLM's parameters", dependencies=_OPERATOR)
    async def reset_prefix_cache(
        reset_running_requests: Annotated[bool, Query(description="Not supported: must be false.")] = False,
        reset_external: Annotated[bool, Query(description="Not supported: must be false.")] = False,
    ) -> FlushDone:
        if reset_running_requests:
            raise RequestError("reset_running_requests is not supported; /pause_generation retracts running requests")
        if reset_external:
            raise RequestError("reset_external is not supported: the storage tier is not emptied while the server runs")
        return FlushDone(flushed_tokens=await manager.flush_cache())

    @router.post("/pause_generation", summary="Stop generating until /continue_generation", dependencies=_OPERATOR)
    async def pause_generation(body: PauseRequest | None = None) -> Done:
        mode = (body or PauseRequest()).mode
        await manager.pause(mode)
        return Done(message=f"generation is paused ({mode})")

    @router.post("/continue_generation", summary="Continue after /pause_generation", dependencies=_OPERATOR)
    async def continue_generation(body: Annotated[ContinueRequest | None, Body()] = None) -> Done:
        await manager.resume()
        return Done(message="generation continues")

    @router.post("/start_profile", summary="Record a trace of the steps", dependencies=_OPERATOR)
    @router.get("/start_profile", summary="As POST", dependencies=_OPERATOR, include_in_schema=False)
    async def start_profile(body: ProfileRequest | None = None) -> ProfileStarted:
        settings = body or ProfileRequest()
        folder = _profile_folder(manager.config.server.profile_dir, settings.output_dir)
        await manager.calls.call_schedulers(
            "start_profile",
            output_dir=str(folder),
            num_steps=settings.num_steps,
            activities=settings.activities or ["CPU", "GPU"],
            with_stack=bool(settings.with_stack),
            record_shapes=bool(settings.record_shapes),
        )
        return ProfileStarted(output_dir=str(folder))

    @router.post(
        "/stop_profile", summary="Stop the recording; the answer lists the trace files", dependencies=_OPERATOR
    )
    @router.get("/stop_profile", summary="As POST", dependencies=_OPERATOR, include_in_schema=False)
    async def stop_profile() -> TracesWritten:
        written = await manager.calls.call_schedulers("stop_profile")
        return TracesWritten(files=[file for files in written for file in files])

    return router


def _profile_folder(profile_dir: str, name: str | None) -> Path:
    """Return the folder for traces.

    Args:
        profile_dir: `server.profile_dir`.
        name: the folder inside `profile_dir` that the client requests; None for `profile_dir` itself.

    Raises:
        RequestError: the folder is outside `profile_dir`, or its name is not valid.
    """
    base = Path(profile_dir).expanduser().resolve()
    if not name:
        return base
    try:
        folder = (base / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a part that is too long, or a loop of links
        raise RequestError(f"output_dir {name!r} is not a valid folder name: {error}") from error
    if not folder.is_relative_to(base):
        raise RequestError(f"output_dir must name a folder inside server.profile_dir, got {name!r}")
    return folder
