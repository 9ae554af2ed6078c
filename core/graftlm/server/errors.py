"""Conversion of exceptions into HTTP statuses and OpenAI's error bodies."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from graftlm.errors import (
    AdapterError,
    AdapterNotFoundError,
    EngineClosedError,
    GraftlmError,
    GrammarError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedFeatureError,
)

__all__ = [
    "ERROR_RESPONSES",
    "FOREIGN_FIELD",
    "MISSPELT",
    "UNKNOWN_FIELD",
    "ApiError",
    "ErrorBody",
    "code_of",
    "error_json",
    "error_response",
    "grammar_of",
    "install_error_handlers",
    "message_of",
    "shortened",
    "status_of",
]

logger = logging.getLogger(__name__)

#: Seconds after which a client may repeat a request that was refused with 429 or 503.
_RETRY_AFTER_S: Final = "1"

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}

_CODES: Final[Mapping[type[Exception], str]] = {
    AdapterNotFoundError: "model_not_found",
    PromptTooLongError: "context_length_exceeded",
    GrammarError: "invalid_grammar",
    UnsupportedFeatureError: "unsupported",
}

#: (class, status). The first class of which the error is an instance determines the status.
_STATUSES: Final[tuple[tuple[type[Exception], int], ...]] = (
    (QueueFullError, 429),
    (AdapterNotFoundError, 404),
    (AdapterError, 400),
    (RequestTimeoutError, 408),
    (RequestFailedError, 500),
    (RequestError, 400),
    (UnavailableError, 503),
    (EngineClosedError, 503),
)


class ApiError(RequestError):
    """An error that refuses a request with an HTTP status and details.

    Attributes:
        status: the HTTP status.
        param: name of the wrong field; None if the error does not concern a field.
        code: short name of the error, for programs; None if it has none.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code


class ErrorDetail(BaseModel):
    """The description of an error."""

    message: str
    type: str = Field(description="The kind of error, such as `invalid_request_error`.")
    param: str | None = Field(
        default=None, description="The name of the wrong field. Null: the error does not concern one field."
    )
    code: str | None = Field(
        default=None, description="A short name of the error, for programs. Null: the error has none."
    )


class ErrorBody(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


#: Parts of a validation error's location that name a member of a union. The client's request does not contain them.
_BRANCHES: Final = frozenset(
    {"one", "many", "one_of_ids", "many_of_ids", "as_text", "as_object", "as_flag", "as_other", "[key]"}
)

#: Type of a validation error: a field's name is similar to a known one. The error's context contains the `name`.
MISSPELT: Final = "misspelt"

#: Type of a validation error: a field's name is unknown. The error's context contains the `name`.
UNKNOWN_FIELD: Final = "unknown_field"

#: Type of a validation error: only other servers have such a field. The error's context contains the `name`.
FOREIGN_FIELD: Final = "foreign_field"

#: Type of a validation error -> `code` in the answer.
_VALIDATION_CODES: Final[Mapping[str, str]] = {
    "unsupported_field": "unsupported",
    FOREIGN_FIELD: "unsupported",
    UNKNOWN_FIELD: "unknown_parameter",
}

#: Maximum number of characters of a field's name in an answer, because the client may have chosen the name.
_MAX_PARAM_LEN: Final = 256

#: Maximum number of characters of a message, because messages quote the request. The middle is left out.
_MAX_MESSAGE_LEN: Final = 2000

_DESCRIPTIONS: Final = {
    400: "The request is wrong.",
    401: "An API key is needed.",
    403: "The request's key, host or web page does not permit this.",
    404: "There is no such model or path.",
    408: "The request took longer than its time limit.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    503: "A process is down or starting, or the server is shutting down.",
}

#: The error answers in the OpenAPI document.
ERROR_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": ErrorBody, "description": text} for status, text in _DESCRIPTIONS.items()
}


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, ApiError):
        return error.status
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def code_of(error: BaseException) -> str | None:
    """Return the code of an error, for programs; None if it has none."""
    if isinstance(error, ApiError):
        return error.code
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), None)


def message_of(error: BaseException) -> str:
    """Return the message of an error for clients. It does not describe internal errors of the server."""
    is_told = isinstance(error, GraftlmError) and (status_of(error) != 500 or isinstance(error, RequestFailedError))
    return str(error) if is_told else "the server failed to handle the request"


def error_json(error: BaseException) -> bytes:
    """Return an error's JSON body, for an answer or for an event of a stream."""
    status = status_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return _body(status, message_of(error), param, code_of(error))


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an error answer in OpenAI's format."""
    return _response(status, _body(status, message, param, code), headers)


@contextmanager
def grammar_of(param: str | None) -> Iterator[None]:
    """Return a context in which grammar errors name the request field that contains the grammar.

    Args:
        param: the field's name.

    Raises:
        ApiError: 400, the block raised a GrammarError, which this error replaces.
    """
    try:
        yield
    except GrammarError as error:
        raise ApiError(400, str(error), param=param, code="invalid_grammar") from error


def install_error_handlers(app: FastAPI) -> None:
    """Make an application answer every error in OpenAI's format."""
    app.add_exception_handler(GraftlmError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http_error)


async def _answer_error(request: Request, error: Exception) -> Response:
    status = status_of(error)
    if status == 500:
        logger.error("%s %s failed", request.method, shortened(request.url.path), exc_info=error)
    request.state.problem = str(error)
    return _response(status, error_json(error))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return error_response(error.status_code, str(error.detail), headers=error.headers)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """Return an answer that names only the first wrong field, since users correct one field at a time."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    is_unknown = first["type"] in ("extra_forbidden", MISSPELT)
    has_field_name = first["type"] in (MISSPELT, FOREIGN_FIELD)
    place = (*first["loc"], first["ctx"]["name"]) if has_field_name else first["loc"]
    param = _name_of_field(place, is_unknown=is_unknown or has_field_name)
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", first["msg"])
        return error_response(400, f"the body is not JSON: {detail}", code="invalid_json")
    if is_unknown:
        hint = f"; {first['msg']}" if first["type"] == MISSPELT else ""
        message = f"Unrecognized request argument supplied: {param}{hint}"
        return error_response(400, message, param=param, code="unknown_parameter")
    if param is None and first["type"] in ("missing", "model_attributes_type", "dict_type"):
        message = "the body must be a JSON object, sent with Content-Type: application/json"
        request.state.problem = message
        return error_response(400, message)
    message = first["msg"] if param is None else f"{param}: {first['msg']}"
    request.state.problem = message
    if first["type"] == UNKNOWN_FIELD:
        param = _name_of_field((*place, first["ctx"]["name"]), is_unknown=True)
    return error_response(400, message, param=param, code=_VALIDATION_CODES.get(first["type"]))


def _name_of_field(place: Sequence[int | str], is_unknown: bool) -> str | None:
    """Return a field's dotted path, without the names of union members; None for the body as a whole.

    Args:
        place: the location in the validation error; its first part is "body", "query" or "path".
        is_unknown: whether the last part is a name that the client chose; such a name is never removed.
    """
    inner, last = place[1:-1], place[1:][-1:]
    path = [part for part in inner if part not in _BRANCHES]
    path += [part for part in last if is_unknown or part not in _BRANCHES]
    return ".".join(map(str, path))[:_MAX_PARAM_LEN] or None


def _body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error")
    detail = {"message": _unicode(shortened(message)), "type": kind, "param": param and _unicode(param), "code": code}
    return msgspec.json.encode({"error": detail})


def shortened(message: str, max_len: int = _MAX_MESSAGE_LEN) -> str:
    """Return a message with about `max_len` characters. The middle is left out, since the ends describe the error.

    Args:
        max_len: number of characters to keep, without the note about the omission.
    """
    if len(message) <= max_len:
        return message
    half = max_len // 2
    return f"{message[:half]} [... {len(message) - 2 * half:,} characters ...] {message[-half:]}"


def _unicode(text: str) -> str:
    """Return a text that UTF-8 can encode. A message may quote half of a surrogate pair, which is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _response(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    retry = {"Retry-After": _RETRY_AFTER_S} if status in (429, 503) else {}
    return Response(body, status, retry | dict(headers or {}), "application/json")
