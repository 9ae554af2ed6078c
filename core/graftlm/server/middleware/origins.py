"""Protection from web pages of other sites that make a browser send requests to this server."""

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
    """Answers 403 to requests of web pages of other sites.

    A browser sends the page's site in `Origin`. This site must be allowed, or equal the site in `Host`, which
    `HostGuard` has checked. Requests without `Origin` do not come from a page. GET, HEAD and OPTIONS have no effects
    and need no check, except at `guarded_paths`. Browsers may omit `Origin` there, so `Sec-Fetch-Site` is also checked.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str] = (), guarded_paths: Collection[str] = ()) -> None:
        """Store the allowed origins.

        Args:
            allowed: origins such as "https://chat.example.org"; "*" allows all.
            guarded_paths: paths where even a GET has an effect.
        """
        self._app = app
        self._allowed = frozenset(origin.rstrip("/").lower() for origin in allowed)
        self._guarded_paths = frozenset(guarded_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403 if a page of another site has sent it."""
        if scope["type"] != "http" or not self._has_effects(scope):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None:
            is_allowed = self._allows(origin.lower(), headers.get("host", ""), scope.get("scheme", "http"))
        else:
            is_allowed = "*" in self._allowed or headers.get("sec-fetch-site") not in ("cross-site", "same-site")
        if is_allowed:
            await self._app(scope, receive, send)
            return
        message = (
            f"web pages of {origin or 'another site'} may not send this request; add the origin to server.cors_origins"
        )
        await error_response(403, message)(scope, receive, send)

    def _has_effects(self, scope: Scope) -> bool:
        return scope["method"] not in _SAFE_METHODS or scope["path"] in self._guarded_paths

    def _allows(self, origin: str, host: str, scheme: str) -> bool:
        if "*" in self._allowed or origin in self._allowed:
            return True
        own = _site(f"{scheme}://{host}", scheme)
        # Behind a proxy with https, the page's scheme differs from the server's scheme. Therefore only the host and the
        # port are compared.
        page = _site(origin, origin.partition(":")[0])
        if own is None or page is None:
            return False
        return own[0] == page[0] and (own[1] == page[1] or _has_default_port(origin, host))


def _site(url: str, scheme: str) -> tuple[str, int | None] | None:
    """Return the host and port of an origin; None if it has no host, such as "null"."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname:
        return None
    return parts.hostname, port or _DEFAULT_PORTS.get(scheme)


def _has_default_port(origin: str, host: str) -> bool:
    """Return whether neither the origin nor the host contains a port.

    Behind a proxy, the page may be loaded over https while the server gets http requests. The default ports of the two
    schemes differ, but the page and the server have the same site.
    """
    return urlsplit(origin).port is None and urlsplit(f"//{host}").port is None
