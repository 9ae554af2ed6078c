"""The routes under /v1/batches and /v1/files."""

import re
from typing import Annotated, Any, ClassVar, Final, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field

from graftlm.config import ServerSettings
from graftlm.server.batches import files_routes
from graftlm.server.batches.pages import page_of
from graftlm.server.batches.records import BatchBody, BatchList
from graftlm.server.batches.service import BatchService
from graftlm.server.errors import ERROR_RESPONSES, ApiError
from graftlm.server.openai.answers import encode
from graftlm.server.openai.document import described
from graftlm.server.openai.requests import OpenAIModel
from graftlm.server.wire import Text

__all__ = ["make_router", "make_router_without_folder"]

_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BatchRequest(OpenAIModel):
    """A request to create a batch."""

    known_at: ClassVar[str | None] = "/v1/batches"

    input_file_id: Text = Field(description="The id of an uploaded file, which has one request in each line.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"] = Field(
        description="The path to which every request of the file is sent."
    )
    completion_window: Text = Field(
        description="Time limit of the batch, such as `24h`, `30m` or `7d`. A batch that has not ended by then expires."
    )
    metadata: dict[str, Any] | None = Field(default=None, description="Values that the batch object returns unchanged.")
    output_expires_after: dict[str, Any] | None = Field(
        default=None,
        description='Age at which the result files are deleted, in the form `{"anchor": "created_at", '
        '"seconds": 3600}`.',
    )


def make_router(service: BatchService, settings: ServerSettings) -> APIRouter:
    """Return a router for files and batches."""
    router = APIRouter(tags=["batches"], responses=ERROR_RESPONSES)
    router.include_router(files_routes.make_router(service, settings.files))

    @router.post("/v1/batches", summary="Run the requests of a file", responses=described(BatchBody))
    async def create_batch(body: BatchRequest) -> Response:
        file = files_routes.find_file(service.folder, body.input_file_id)
        seconds = files_routes.seconds_of(body.output_expires_after, "output_expires_after")
        window_s = _seconds(body.completion_window)
        return _json(service.create(file, body.endpoint, body.completion_window, window_s, body.metadata, seconds))

    @router.get("/v1/batches", summary="List the batches, newest first", responses=described(BatchList))
    async def list_batches(limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None) -> Response:
        page = page_of(service.all(), limit, after)
        return _json(BatchList(data=page.items, first_id=page.first_id, last_id=page.last_id, has_more=page.has_more))

    @router.get("/v1/batches/{batch_id}", summary="A batch", responses=described(BatchBody))
    async def get_batch(batch_id: str) -> Response:
        return _json(_found(service.get(batch_id), batch_id))

    @router.post(
        "/v1/batches/{batch_id}/cancel", summary="Cancel a batch; its results are kept", responses=described(BatchBody)
    )
    async def cancel_batch(batch_id: str) -> Response:
        return _json(_found(service.cancel(batch_id), batch_id))

    return router


def make_router_without_folder() -> APIRouter:
    """Return a router whose answers name the missing setting."""
    router = APIRouter()

    @router.api_route("/v1/files", methods=["GET", "POST"], include_in_schema=False)
    @router.api_route("/v1/batches", methods=["GET", "POST"], include_in_schema=False)
    async def refuse() -> Response:
        raise ApiError(
            404, "files and batches are disabled on this server; set server.files.path to a folder", code="unsupported"
        )

    return router


def _json(body: Any) -> Response:
    return Response(encode(body), media_type="application/json")


def _found(batch: BatchBody | None, batch_id: str) -> BatchBody:
    if batch is None:
        raise ApiError(404, f"there is no batch {batch_id[:256]!r}", code="not_found")
    return batch


def _seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    if match is None:
        message = f"completion_window: expected a time such as 24h, 30m or 7d, got {window[:64]!r}"
        raise ApiError(400, message, param="completion_window")
    return int(match[1]) * _UNIT_S[match[2]]
