"""The role of a request by its key and origin: administrator, operator or client; or why it is refused."""

import hmac
from collections.abc import Collection
from enum import Enum
from functools import partial
from typing import Final

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.config import is_loopback
from graftlm.server.errors import error_response
from graftlm.server.middleware.hosts import host_of

__all__ = ["ApiKeyAuth", "Role", "require_admin", "require_operator"]

_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}

#: Header fields that proxies add, in lower case.
_FORWARDED: Final = frozenset(
    {
        "cdn-loop",
        "client-ip",
        "fastly-client-ip",
        "fly-client-ip",
        "forwarded",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-proxyuser-ip",
        "x-real-ip",
    }
)
_FORWARDED_PREFIXES: Final = ("cf-", "x-envoy-", "x-forwarded", "x-original-")


class Role(Enum):
    """What a request may do."""

    ADMIN = "replace weights, load adapters, and all that the others may"
    OPERATOR = "flush, pause, profile, abort everything, see what is cached, and all that clients may"
    CLIENT = "generate"


class ApiKeyAuth:
    """Lets requests in by their bearer token, and notes their role for `require_operator` and `require_admin`.

    | api_key | admin_api_key | no token or a wrong one         | api_key | admin_api_key |
    | ------- | ------------- | ------------------------------- | ------- | ------------- |
    | -       | -             | operator if local, else client  |         |               |
    | set     | -             | 401                             | client  |               |
    | -       | set           | client                          |         | admin         |
    | set     | set           | 401                             | client  | admin         |

    A request is local if the server listens on a loopback address, the client's address and the request's `Host` are
    loopback ones, it comes over HTTP/1.1 (nginx's default for its upstreams is 1.0), and no proxy has left a header
    field. With `open_admin` every client is an admin.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: SecretStr | None = None,
        admin_api_key: SecretStr | None = None,
        open_paths: Collection[str] = (),
        *,
        host: str = "",
        open_admin: bool = False,
    ) -> None:
        """Take the keys.

        Args:
            open_paths: need no key.
            host: the address that the server listens on.
            open_admin: whether every client is an admin.
        """
        self._app = app
        self._host = host
        self._open_admin = open_admin
        self._api_key = _as_bytes(api_key)
        self._admin_api_key = _as_bytes(admin_api_key)
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through with its role, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        role = self._role(scope)
        if role is None and scope["path"] not in self._open_paths:
            message = "a valid API key is needed: send it as `Authorization: Bearer KEY`"
            await error_response(401, message, code="invalid_api_key", headers=_CHALLENGE)(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["role"], state["why_not"] = role or Role.CLIENT, partial(self._why_not, scope)
        await self._app(scope, receive, send)

    def _role(self, scope: Scope) -> Role | None:
        """Return what a request may do; None for nothing. Takes the same time for every wrong token."""
        token = _bearer_token(scope)
        is_admin = _matches(token, self._admin_api_key)
        is_client = _matches(token, self._api_key)
        if is_admin:
            return Role.ADMIN
        if not is_client and self._api_key is not None:
            return None
        if self._open_admin:
            return Role.ADMIN
        return Role.CLIENT if self._why_not(scope, Role.OPERATOR) else Role.OPERATOR

    def _why_not(self, scope: Scope, role: Role) -> str | None:
        """Return why a request without the admin key has not the role of an operator or administrator; None if it has.

        Without `open_admin`.
        """
        if self._admin_api_key is not None:
            token = _bearer_token(scope)
            return "its bearer token is not server.admin_api_key" if token else "it has no bearer token"
        if role is Role.ADMIN:
            return "no server.admin_api_key is set"
        if self._api_key is not None:
            return "server.api_key is set and server.admin_api_key is not"
        if not is_loopback(self._host):
            return f"the server listens on {self._host}, which is not a loopback address, and has no admin key"
        return _why_not_local(scope)


def require_admin(request: Request) -> None:
    """Let only administrators through; a dependency of routes.

    Raises:
        HTTPException: 403, the request may not administer.
    """
    _require(request, Role.ADMIN)


def require_operator(request: Request) -> None:
    """Let only operators and administrators through; a dependency of routes.

    Raises:
        HTTPException: 403, the request has a client's rights.
    """
    _require(request, Role.ADMIN, Role.OPERATOR)


def _require(request: Request, *roles: Role) -> None:
    state = request.scope.get("state", {})
    if state.get("role") not in roles:
        why = state["why_not"](roles[-1]) if "why_not" in state else "the server has no authentication"
        raise HTTPException(
            403,
            f"the request may not administer: {why}. Set server.admin_api_key and send it as a bearer token, or set "
            "server.open_admin to let every client administer",
        )


def _why_not_local(scope: Scope) -> str | None:
    """Return what shows that a request may come from another machine; None if nothing in it does."""
    client, headers = scope.get("client"), Headers(scope=scope)
    if client is None or not is_loopback(client[0]):
        return f"it comes from {'an unknown address' if client is None else client[0]}, not from this machine"
    host = host_of(headers.get("host", ""))
    if host is None or not is_loopback(host):
        return "its Host is not a loopback address, so it may have come through a proxy"
    proxy_field = next(filter(_is_of_proxy, headers), None)
    if proxy_field is not None:
        return f"its header field {proxy_field[:60]!r} shows that it came through a proxy"
    if scope.get("http_version") != "1.1":
        return f"it came over HTTP/{scope.get('http_version')}, as from a proxy; a local request uses HTTP/1.1"
    return None


def _is_of_proxy(field: str) -> bool:
    return field in _FORWARDED or field.startswith(_FORWARDED_PREFIXES)


def _as_bytes(key: SecretStr | None) -> bytes | None:
    return None if key is None else key.get_secret_value().encode()


def _bearer_token(scope: Scope) -> bytes:
    """Return the token of the Authorization header, b"" without one."""
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _matches(token: bytes, key: bytes | None) -> bool:
    return key is not None and hmac.compare_digest(token, key)
