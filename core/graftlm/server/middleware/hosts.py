"""Protection from DNS rebinding: a request must be addressed to this server by a name that is its own."""

import re
from collections.abc import Collection
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.config import canonical_host, is_address, is_loopback
from graftlm.server.errors import error_response
from graftlm.server.http_protocol import TARGET_AUTHORITY

__all__ = ["HostGuard", "host_of"]

_AUTHORITY: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._~-]+))(?::([0-9]{0,5}))?")


class HostGuard:
    """Answers 400 to requests without one clear `Host`, and 403 to those for a host that is not this server.

    Any name may be made to point to this machine, and a page of that name may then read what a server on the loopback
    interface answers. Its requests have that name in `Host`, whatever their method.

    | server listens on | `allowed_hosts` null       | `allowed_hosts` set                               |
    | ----------------- | -------------------------- | ------------------------------------------------- |
    | loopback          | loopback names and `host`  | loopback names, `host` and `allowed_hosts`        |
    | other addresses   | any                        | loopback names, `host` and `allowed_hosts`        |

    Loopback names are localhost, *.localhost, 127.0.0.0/8 and ::1. The port does not count. On other addresses, health
    checks are also answered for any IP address: Kubernetes sends the pod's, and an address cannot be rebound.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        allowed: Collection[str] | None = None,
        probe_paths: Collection[str] = (),
    ) -> None:
        """Take the server's names.

        Args:
            host: the address that the server listens on.
            allowed: further names, "*.example.org" for those below one, "*" for all.
            probe_paths: of health checks.
        """
        self._app = app
        self._listens_on = host
        self._is_any = "*" in allowed if allowed is not None else not is_loopback(host)
        names = {canonical_host(name) for name in (host, *(allowed or ()))}
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._probe_paths = frozenset() if is_loopback(host) else frozenset(probe_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through that is meant for this server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        target: str | None = scope.get("state", {}).get(TARGET_AUTHORITY)
        problem = _problem(hosts, target, scope.get("http_version", "1.1"))
        if problem is not None:
            await error_response(400, problem, code="invalid_host")(scope, receive, send)
            return
        name = host_of(hosts[0]) if hosts else None
        if name is None or self._is_own(name) or (scope["path"] in self._probe_paths and is_address(name)):
            await self._app(scope, receive, send)
            return
        message = (
            f"this server is not {name!r}; it listens on {self._listens_on}. If a proxy in front of it has this name, "
            "list it in server.allowed_hosts"
        )
        await error_response(403, message, code="host_not_allowed")(scope, receive, send)

    def _is_own(self, name: str) -> bool:
        return self._is_any or is_loopback(name) or name in self._names or name.endswith(self._suffixes)


def host_of(authority: str) -> str | None:
    """Return the name or address in `name:port`: in lower case, without brackets, port and trailing dot.

    None when it is none, such as one with a user's name or a space.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None or int(match[3] or 0) > 65535:
        return None
    name = canonical_host(match[1] or match[2])
    return name or None


def _problem(hosts: list[str], target: str | None, version: str) -> str | None:
    """Return why a request does not say clearly which host it is for."""
    if len(hosts) > 1:
        return f"a request must have one Host header, got {len(hosts)}"
    if not hosts:
        # Health checks of HTTP/1.0 have none. Browsers never send that.
        return None if version == "1.0" and target is None else "a request must have a Host header"
    if host_of(hosts[0]) is None:
        return f"the Host header must be a name or an address, with a port or without, got {hosts[0]!r}"
    if target is not None and (host_of(target) is None or target.lower() != hosts[0].lower()):
        return f"the request's target is of {target!r}, its Host header says {hosts[0]!r}"
    return None
