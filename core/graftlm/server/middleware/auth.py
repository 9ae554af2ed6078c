"""Who a request comes from: the administrator, a client with a key, or nobody."""

import hmac
from collections.abc import Collection
from enum import Enum

from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from graftlm.server.errors import error_response

__all__ = ["ApiKeyAuth", "Role", "require_admin"]

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Role(Enum):
    """What a request may do."""

    ADMIN = "admin"
    CLIENT = "client"


class ApiKeyAuth:
    """Lets requests in by their bearer token, and notes their role for `require_admin`.

    | api_key | admin_api_key | no token or a wrong one | api_key | admin_api_key |
    | ------- | ------------- | ----------------------- | ------- | ------------- |
    | -       | -             | admin                   |         |               |
    | set     | -             | 401                     | admin   |               |
    | -       | set           | client                  |         | admin         |
    | set     | set           | 401                     | client  | admin         |
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: SecretStr | None = None,
        admin_api_key: SecretStr | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        """Take the keys.

        Args:
            open_paths: need no key.
        """
        self._app = app
        self._api_key = _as_bytes(api_key)
        self._admin_api_key = _as_bytes(admin_api_key)
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through with its role, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        role = self._role(_bearer_token(scope))
        if role is None and scope["path"] not in self._open_paths:
            message = "a valid API key is needed: send it as `Authorization: Bearer KEY`"
            await error_response(401, message, code="invalid_api_key", headers=_CHALLENGE)(scope, receive, send)
            return
        scope.setdefault("state", {})["role"] = role or Role.CLIENT
        await self._app(scope, receive, send)

    def _role(self, token: bytes) -> Role | None:
        """Return whom a token belongs to; None for nobody. Takes the same time for every wrong token."""
        is_admin = _matches(token, self._admin_api_key)
        is_client = _matches(token, self._api_key)
        if is_admin:
            return Role.ADMIN
        if is_client or self._api_key is None:
            return Role.ADMIN if self._admin_api_key is None else Role.CLIENT
        return None


def require_admin(request: Request) -> None:
    """Let only the administrator through; a dependency of routes.

    Raises:
        HTTPException: 403, the request has a client's rights.
    """
    if request.scope.get("state", {}).get("role") is not Role.ADMIN:
        raise HTTPException(403, "this needs the server's admin API key (server.admin_api_key)")


def _as_bytes(key: SecretStr | None) -> bytes | None:
    return None if key is None else key.get_secret_value().encode()


def _bearer_token(scope: Scope) -> bytes:
    """Return the token of the Authorization header, b"" without one."""
    value: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = value.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _matches(token: bytes, key: bytes | None) -> bool:
    return key is not None and hmac.compare_digest(token, key)
