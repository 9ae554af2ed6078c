"""The role of a request (administrator, operator or client), which follows from its key and origin."""

import hmac
from collections.abc import Callable, Collection
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
    """The rights of a request. Each role includes the rights of the roles below it."""

    ADMIN = "replace weights, load adapters, and everything that operators may do"
    OPERATOR = "flush, pause, profile, abort everything, read the cache's content, and everything that clients may do"
    CLIENT = "generate"


class ApiKeyAuth:
    """Checks the bearer token of requests, and records their role for `require_operator` and `require_admin`.

    | api_key | admin_api_key | no token or a wrong one         | api_key | admin_api_key |
    | ------- | ------------- | ------------------------------- | ------- | ------------- |
    | -       | -             | operator if local, else client  |         |               |
    | set     | -             | 401                             | client  |               |
    | -       | set           | client                          |         | admin         |
    | set     | set           | 401                             | client  | admin         |

    A request is local if all of these conditions are true:

    - The server's address, the client's address and the request's `Host` are loopback addresses.
    - The request uses HTTP/1.1. nginx uses 1.0 for its upstreams by default.
    - The request has no header field that proxies add.

    With `open_admin`, every client is an admin.
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
        takes_key_header: Callable[[str], bool] = lambda path: False,
    ) -> None:
        """Store the keys.

        Args:
            api_key: the key of clients; None if clients need no key.
            admin_api_key: the key of administrators; None if no key gives this role.
            open_paths: paths that need no key.
            host: the address on which the server listens.
            open_admin: whether every client is an admin.
            takes_key_header: whether requests to a path may send the key in the header `x-api-key`.
        """
        self._app = app
        self._host = host
        self._open_admin = open_admin
        self._api_key = _as_bytes(api_key)
        self._admin_api_key = _as_bytes(admin_api_key)
        self._open_paths = frozenset(open_paths)
        self._takes_key_header = takes_key_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its role, or answer 401."""
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
        """Return the role of a request; None if it is refused. The check takes the same time for every wrong token."""
        token = self._token(scope)
        is_admin = _matches(token, self._admin_api_key)
        is_client = _matches(token, self._api_key)
        if is_admin:
            return Role.ADMIN
        if not is_client and self._api_key is not None:
            return None
        if self._open_admin:
            return Role.ADMIN
        return Role.CLIENT if self._why_not(scope, Role.OPERATOR) else Role.OPERATOR

    def _token(self, scope: Scope) -> bytes:
        """Return the key that a request contains; b"" if it contains none."""
        token = _bearer_token(scope)
        if not token and self._takes_key_header(scope["path"]):
            token = next((value.strip() for name, value in scope["headers"] if name == b"x-api-key"), b"")
        return token

    def _why_not(self, scope: Scope, role: Role) -> str | None:
        """Return the reason why a request without the admin key does not have a role; None if it has the role.

        Must not be called with `open_admin`, which gives every request the role ADMIN.

        Args:
            role: ADMIN or OPERATOR.
        """
        if self._admin_api_key is not None:
            token = self._token(scope)
            return "its bearer token is not server.admin_api_key" if token else "it has no bearer token"
        if role is Role.ADMIN:
            return "no server.admin_api_key is set"
        if self._api_key is not None:
            return "server.api_key is set and server.admin_api_key is not"
        if not is_loopback(self._host):
            return f"the server listens on {self._host}, which is not a loopback address, and has no admin key"
        return _why_not_local(scope)


def require_admin(request: Request) -> None:
    """Refuse requests that do not come from an administrator. Used as a dependency of routes.

    Raises:
        HTTPException: 403, the request has another role.
    """
    _require(request, Role.ADMIN)


def require_operator(request: Request) -> None:
    """Refuse requests that come from neither an operator nor an administrator. Used as a dependency of routes.

    Raises:
        HTTPException: 403, the request has the role CLIENT.
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
    """Return the reason why a request may come from another machine; None if there is none."""
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
    """Return the token of the Authorization header; b"" if there is none."""
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _matches(token: bytes, key: bytes | None) -> bool:
    return key is not None and hmac.compare_digest(token, key)
