"""Protection of a local server from web pages: a browser may not be made to drive it."""

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.server.errors import error_response

__all__ = ["OriginGuard"]

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class OriginGuard:
    """Answers 403 to what a page of another site sends.

    A browser names the page's site in `Origin`. It has to be one of the allowed ones, or the site the request goes to,
    which `HostGuard` has checked. Requests without `Origin` come from no page; GET, HEAD and OPTIONS change nothing,
    but for those at `guarded_paths`, which also `Sec-Fetch-Site` protects.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = (), guarded_paths: Collection[str] = ()) -> None:
        """Take whom to trust.

        Args:
            allowed: origins such as "https://chat.example.org"; "*" allows all.
            guarded_paths: paths where even a GET changes something.
        """
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._guarded_paths = frozenset(guarded_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through that no foreign page has sent."""
        if scope["type"] != "http" or not self._changes_something(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None:
            trusted = self._trusts(origin.lower(), headers.get("host", ""), scope.get("scheme", "http"))
        else:
            trusted = "*" in self._allowed or headers.get("sec-fetch-site") not in ("cross-site", "same-site")
        if trusted:
            await self._app(scope, receive, send)
            return
        message = f"a page of {origin or 'another site'} may not do this; list its origin in server.cors_origins"
        await error_response(403, message)(scope, receive, send)

    def _changes_something(self, scope: Scope) -> bool:
        return scope["method"] not in _SAFE_METHODS or scope["path"] in self._guarded_paths

    def _trusts(self, origin: str, host: str, scheme: str) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        own = _site(f"{scheme}://{host}", scheme)
        # Behind a proxy that speaks https the page's scheme is not ours: host and port decide.
        theirs = _site(origin, origin.partition(":")[0])
        if own is None or theirs is None:
            return False
        return own[0] == theirs[0] and (own[1] == theirs[1] or _has_default_port(origin, host))


def _site(url: str, scheme: str) -> tuple[str, int | None] | None:
    """Return host and port of an origin; None when it is none, such as "null"."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname:
        return None
    return parts.hostname, port or _DEFAULT_PORTS.get(scheme)


def _has_default_port(origin: str, host: str) -> bool:
    """Whether neither names a port: the page came over https through a proxy, the request over http."""
    return urlsplit(origin).port is None and urlsplit(f"//{host}").port is None
