"""The routes under /v1/files."""

import contextlib
import time
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect

from graftlm.config import FileSettings
from graftlm.server.batches.folder import BatchFolder
from graftlm.server.batches.pages import page_of
from graftlm.server.batches.records import DeletedFile, FileBody, FileList, new_record_id
from graftlm.server.batches.service import BatchService
from graftlm.server.errors import ApiError
from graftlm.server.openai.answers import encode
from graftlm.server.openai.document import described

__all__ = ["FILES_PATH", "find_file", "make_router", "seconds_of"]

FILES_PATH: Final = "/v1/files"

_CHUNK_BYTES: Final = 1 << 20
_UPLOAD: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "One JSON object per line."},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def make_router(service: BatchService, settings: FileSettings) -> APIRouter:
    """Return a router with the routes of this module."""
    router = APIRouter()
    folder = service.folder

    @router.post(
        FILES_PATH, summary="Upload requests for a batch", responses=described(FileBody), openapi_extra=_UPLOAD
    )
    async def upload_file(request: Request) -> Response:
        if folder.num_bytes >= settings.max_bytes:
            message = (
                f"the uploaded files have reached the maximum size server.files.max_bytes, {settings.max_bytes} bytes; "
                "delete some files"
            )
            raise ApiError(400, message, code="storage_full")
        async with _form(request) as form:
            return _json(await _store(folder, form))

    @router.get(FILES_PATH, summary="The files, the newest first", responses=described(FileList))
    async def list_files(
        purpose: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
        after: str | None = None,
    ) -> Response:
        files = [file for file in folder.files() if purpose in (None, file.purpose)]
        page = page_of(files if order == "desc" else files[::-1], limit, after)
        return _json(FileList(data=page.items, first_id=page.first_id, last_id=page.last_id, has_more=page.has_more))

    @router.get(FILES_PATH + "/{file_id}", summary="A file", responses=described(FileBody))
    async def get_file(file_id: str) -> Response:
        return _json(find_file(folder, file_id))

    @router.get(
        FILES_PATH + "/{file_id}/content",
        summary="The content of a file",
        responses={200: {"description": "The content.", "content": {"application/octet-stream": {}}}},
    )
    async def get_content(file_id: str) -> Response:
        file = find_file(folder, file_id)
        return FileResponse(folder.content(file.id), media_type="application/octet-stream")

    @router.delete(FILES_PATH + "/{file_id}", summary="Delete a file", responses=described(DeletedFile))
    async def delete_file(file_id: str) -> Response:
        file = find_file(folder, file_id)
        if service.uses(file.id):
            raise ApiError(
                400, f"a batch that has not ended uses the file {file.id}; cancel the batch first", code="file_in_use"
            )
        folder.remove_file(file.id)
        return _json(DeletedFile(id=file.id))

    return router


def find_file(folder: BatchFolder, file_id: str) -> FileBody:
    """Return a file.

    Raises:
        ApiError: 404, the file does not exist.
    """
    file = folder.file(file_id)
    if file is None:
        raise ApiError(404, f"there is no file {file_id[:256]!r}", code="not_found")
    return file


def seconds_of(expires: Any, param: str) -> int | None:
    """Return the number of seconds in `expires_after`; None if it is not set.

    Raises:
        ApiError: 400, the value is malformed.
    """
    if expires is None:
        return None
    if expires.get("anchor") != "created_at" or not str(expires.get("seconds")).isdecimal():
        raise ApiError(400, f'{param}: expected {{"anchor": "created_at", "seconds": ...}}', param=param)
    return min(int(str(expires["seconds"])[:12]), 2**31)


@contextlib.asynccontextmanager
async def _form(request: Request) -> Any:
    """Read a form. Its parts are in temporary files until the context ends.

    Raises:
        ApiError: 400, the form is malformed.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "send the file as multipart/form-data, in the field `file`", param="file")
    try:
        form = await request.form(max_files=1, max_fields=16)
    except (MultiPartException, ValueError) as error:
        raise ApiError(400, f"the form is malformed: {error}") from error
    try:
        yield form
    finally:
        with contextlib.suppress(ClientDisconnect):
            await form.close()


async def _store(folder: BatchFolder, form: FormData) -> FileBody:
    """Store the file of a form.

    Raises:
        ApiError: 400, a field of the form is missing or invalid.
    """
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "file: the file is missing", param="file")
    if purpose != "batch":
        raise ApiError(400, f"purpose: only 'batch' is supported, got {str(purpose)[:64]!r}", param="purpose")
    nested = {name.removeprefix("expires_after[").rstrip("]"): value for name, value in form.items()}
    expires = nested if any(name.startswith("expires_after[") for name in form) else None
    seconds = seconds_of(expires, "expires_after")
    now = int(time.time())
    file_id = new_record_id("file")
    content = folder.content(file_id)
    num_bytes = 0
    try:
        with content.open("xb") as file:
            while chunk := await upload.read(_CHUNK_BYTES):
                file.write(chunk)
                num_bytes += len(chunk)
        record = FileBody(
            id=file_id,
            bytes=num_bytes,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
            filename=(upload.filename or "requests.jsonl").encode("utf-8", "replace").decode()[:256],
            purpose="batch",
        )
        folder.save_file(record)
    except BaseException:
        folder.remove_file(file_id)
        raise
    return record


def _json(body: Any) -> Response:
    return Response(encode(body), media_type="application/json")
