"""Protection from DNS rebinding, which checks that the `Host` of a request is a name of this server."""

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
    """Answers 400 to a request without exactly one valid `Host`, and 403 to a request for another host.

    An attacker can make any name resolve to this machine. A web page loaded under that name may then read the answers
    of a server on the loopback interface. All requests of such a page have that name in `Host`.

    | server listens on | `allowed_hosts` null       | `allowed_hosts` set                               |
    | ----------------- | -------------------------- | ------------------------------------------------- |
    | loopback          | loopback names and `host`  | loopback names, `host` and `allowed_hosts`        |
    | other addresses   | any                        | loopback names, `host` and `allowed_hosts`        |

    Loopback names are localhost, *.localhost, 127.0.0.0/8 and ::1. The port is ignored.

    A server on other addresses also answers health checks whose `Host` is an IP address, because Kubernetes sends the
    pod's address. This is safe, because DNS rebinding needs a name.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        allowed: Collection[str] | None = None,
        probe_paths: Collection[str] = (),
    ) -> None:
        """Store the server's names.

        Args:
            host: the address on which the server listens.
            allowed: further names; "*.example.org" allows all names below example.org, and "*" allows all names. The
                table in the docstring of the class shows the meaning of None.
            probe_paths: the paths of health checks.
        """
        self._app = app
        self._listens_on = host
        self._allows_all = "*" in allowed if allowed is not None else not is_loopback(host)
        names = {canonical_host(name) for name in (host, *(allowed or ()))}
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._probe_paths = frozenset() if is_loopback(host) else frozenset(probe_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if its `Host` is valid and allowed, else answer 400 or 403."""
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
        return self._allows_all or is_loopback(name) or name in self._names or name.endswith(self._suffixes)


def host_of(authority: str) -> str | None:
    """Return the host in `host:port`, in lower case, without brackets, port and trailing dot.

    Returns: a name or an address; None if `authority` is not valid, for instance if it contains a user name or a space.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None or int(match[3] or 0) > 65535:
        return None
    name = canonical_host(match[1] or match[2])
    return name or None


def _problem(hosts: list[str], target: str | None, version: str) -> str | None:
    """Return the problem of a request whose host is missing, invalid or ambiguous; None if there is no problem.

    Args:
        hosts: the values of all `Host` header fields.
        target: the authority in the request's target; None if the target is a path.
        version: the version of HTTP.
    """
    if len(hosts) > 1:
        return f"a request must have one Host header, got {len(hosts)}"
    if not hosts:
        # Health checks over HTTP/1.0 have no Host. Browsers never use HTTP/1.0.
        return None if version == "1.0" and target is None else "a request must have a Host header"
    if host_of(hosts[0]) is None:
        return f"the Host header must be a name or an address, with or without a port, got {hosts[0]!r}"
    if target is not None and (host_of(target) is None or target.lower() != hosts[0].lower()):
        return f"the request's target names the host {target!r}, but its Host header names {hosts[0]!r}"
    return None
