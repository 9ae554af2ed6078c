"""Translation of requests of other APIs to chat requests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from graftlm.errors import RequestError
from graftlm.server.errors import ApiError, code_of, status_of
from graftlm.server.openai.requests import ChatRequest

__all__ = ["fields_named", "translated"]


def translated(fields: Mapping[str, Any]) -> ChatRequest:
    """Return the chat request with these fields.

    Raises:
        ApiError: 400, a value is not valid in a chat request.
    """
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(400, f"{where}: {first['msg']}", param=where or None) from error


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename chat fields in the message and `param` of errors raised in the block.

    Args:
        names: part of a chat field's path -> its name in the other API.

    Raises:
        ApiError: replaces a RequestError.
    """
    try:
        yield
    except RequestError as error:
        message, param = str(error), error.param
        for own, other in names.items():
            message = message.replace(own, other)
            param = param and param.replace(own, other)
        status = status_of(error)
        raise ApiError(status, message, param=param, code=code_of(error)) from error
