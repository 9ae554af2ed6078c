"""The HTTP client of the backends: JSON and server-sent events; every failure becomes a GraftlmError."""

import asyncio
import json
import math
import os
import socket
import ssl
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import wait
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from graftlm.errors import (
    ConfigError,
    EngineError,
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
from graftlm.lang.backends.server_events import server_events
from graftlm.lang.event_loop import is_in_shared_loop, shared_loop

if TYPE_CHECKING:
    import aiohttp

__all__ = ["HttpClient", "refusal", "status_of_event"]

_CONNECT_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 1.0

#: TCP keep-alive: seconds without data before the first probe, seconds between probes, number of probes.
_KEEPALIVE: Final[Mapping[str, int]] = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}

_ERRORS: Final[Mapping[int, type[GraftlmError]]] = {
    404: UnsupportedFeatureError,
    405: UnsupportedFeatureError,
    408: RequestTimeoutError,
    429: QueueFullError,
    500: RequestFailedError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
    529: UnavailableError,  # Anthropic's status for an overloaded service
}

#: Code in an error's body -> error class; it takes precedence over the class for the HTTP status.
_ERRORS_OF_CODES: Final[Mapping[Any, type[GraftlmError]]] = {
    "context_length_exceeded": PromptTooLongError,
    "invalid_grammar": GrammarError,
    "model_not_found": RequestError,
    "unsupported": UnsupportedFeatureError,
}

#: Type of an error event in a stream -> HTTP status.
_STATUSES_OF_TYPES: Final[Mapping[Any, int]] = {
    "invalid_request_error": 400,
    "timeout_error": 408,
    "rate_limit_error": 429,
    "overloaded_error": 503,
    "service_unavailable_error": 503,
}


class HttpClient:
    """Sends requests to one server, in the language's event loop.

    Connections are opened when they are needed, even after `close`. If a call is cancelled, its connection is closed,
    and the server then aborts the request.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        timeout_s: float | None,
        hint: str = "",
        ca_file: str | None = None,
    ) -> None:
        """Create a client; opens no connection.

        Args:
            api_key: sent with each request.
            timeout_s: a request is aborted after this number of seconds without a byte from the server; None: no limit.
            hint: description of a likely error in the URL, for the message of an answer with status 404.
            ca_file: file with the certificates of the authorities that may sign the server's certificate; None: the
                system's authorities.

        Raises:
            ConfigError: the URL or `timeout_s` is invalid.
        """
        _check_timeout(timeout_s)
        self.url = _checked(base_url).rstrip("/")
        self._hint = hint
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s
        self._ssl = True if ca_file is None else _ssl_context(ca_file)
        self._sessions: list[aiohttp.ClientSession] = []
        self._process_id = os.getpid()
        self._finalizer = weakref.finalize(self, _close, self._sessions)  # is also called at the end of the process

    async def json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer of a request.

        Raises:
            GraftlmError: the server refuses, cannot be reached, or answers in another format.
        """
        async with self._request(method, path, body) as response:
            body_read = await response.read()
        try:
            return json.loads(body_read)
        except (ValueError, RecursionError) as error:
            start = body_read[:80].decode(errors="replace")
            raise EngineError(f"{self.url}{path} must answer with JSON, got {start!r}: {error}") from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON answer of a POST request; raises like `json`."""
        return await self.json("POST", path, body)

    async def find(self, *paths: str) -> Any:
        """Return the JSON of the first page that exists on the server, or None; raises like `json`."""
        for path in paths:
            try:
                return await self.json("GET", path)
            except UnsupportedFeatureError:
                continue
        return None

    async def call(self, method: str, path: str) -> None:
        """Make a request and ignore its answer; raises like `json`."""
        async with self._request(method, path, None) as response:
            await response.read()

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the server-sent events of the answer to a POST request; raises like `json`."""
        async with (
            self._request("POST", path, body) as response,
            aclosing(server_events(response.content.iter_any())) as events,
        ):
            try:
                async for event in events:
                    if isinstance(event, dict) and event.get("error"):
                        raise refusal(status_of_event(event["error"]), event)
                    yield event
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise EngineError(f"{self.url}{path} sent an event that is not JSON: {error}") from None

    def close(self) -> None:
        """Close the connections; active requests fail. May be called twice."""
        _close(self._sessions)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        import aiohttp

        try:
            async with self._session().request(method, self.url + path, json=body) as response:
                if response.status >= 400:
                    about = self._about(response.status, path)
                    raise refusal(response.status, _json_or_text(await response.text(errors="replace")), about)
                yield response
        except aiohttp.ConnectionTimeoutError as error:
            raise UnavailableError(f"cannot connect to {self.url} within {_CONNECT_TIMEOUT_S:g} s") from error
        except TimeoutError as error:
            raise RequestTimeoutError(f"{self.url} sent nothing for {self._timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"the connection to {self.url} failed: {type(error).__name__}: {error}") from error

    def _about(self, status: int, path: str) -> str:
        """Return text to append to an error's message: the URL of a missing page, because the URL may be wrong."""
        if status not in (404, 405):
            return ""
        return f" ({self.url}{path}{'; ' if self._hint else ''}{self._hint})"

    def _session(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._process_id != os.getpid():
            self._abandon_sessions()
        if not self._sessions:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=self._timeout_s)
            # The number of connections is not limited, because callers limit their requests.
            connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl, socket_factory=_keepalive_socket)
            self._sessions.append(aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers))
        return self._sessions[0]

    def _abandon_sessions(self) -> None:
        """Drop the parent's connections in a forked process; the parent continues to use them."""
        self._finalizer.detach()
        self._process_id, self._sessions = os.getpid(), []
        self._finalizer = weakref.finalize(self, _close, self._sessions)


def _keepalive_socket(address: "tuple[Any, ...]") -> socket.socket:
    """Return a socket that detects within a minute, also during an answer, that the server's machine is unreachable."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # some systems lack this option
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def refusal(status: int, body: Any, about: str = "") -> GraftlmError:
    """Return the error for a server's refusal; `about` is appended to its message."""
    detail = body.get("error", body) if isinstance(body, dict) else body
    message = detail.get("message", detail) if isinstance(detail, dict) else detail
    if (known := _kind_of(detail)) is not None:
        return known(f"the server answered {status}: {message}")
    kind = _ERRORS.get(status, RequestError if status < 500 else EngineError)
    return kind(f"the server answered {status}: {message}{about}")


def _kind_of(detail: Any) -> type[GraftlmError] | None:
    """Return the error class for the code in a body, or RequestError if the body's `param` is "model"; else None."""
    if not isinstance(detail, dict):
        return None
    code = detail.get("code")
    by_code = _ERRORS_OF_CODES.get(code) if isinstance(code, str) else None
    return RequestError if by_code is None and detail.get("param") == "model" else by_code


def status_of_event(detail: Any) -> int:
    """Return the HTTP status that corresponds to an error event in a stream."""
    code, kind = (detail.get("code"), detail.get("type")) if isinstance(detail, dict) else (None, None)
    if isinstance(code, int) and 400 <= code < 600:  # SGLang's codes are HTTP statuses
        return code
    return _STATUSES_OF_TYPES.get(kind, 500) if isinstance(kind, str) else 500


def _check_timeout(timeout_s: float | None) -> None:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and math.isfinite(timeout_s) and timeout_s > 0):
        raise ConfigError(f"timeout_s must be a number of seconds above 0, or None for no limit, got {timeout_s!r}")


def _checked(url: str) -> str:
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"base_url must be a URL such as http://127.0.0.1:30000, got {url!r}")
    return url


def _ssl_context(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, TypeError, ssl.SSLError) as error:
        raise ConfigError(f"verify must be a file of certificates, got {ca_file!r}: {error}") from error


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _close(sessions: "list[aiohttp.ClientSession]") -> None:
    """Close sessions in the shared loop; wait for this up to a second, unless the caller runs in that loop."""

    async def close(closing: "list[aiohttp.ClientSession]") -> None:
        for session in closing:
            await session.close()

    closing = list(sessions)
    sessions.clear()
    if not closing:
        return
    closed = asyncio.run_coroutine_threadsafe(close(closing), shared_loop())
    if not is_in_shared_loop():
        wait([closed], _CLOSE_TIMEOUT_S)
