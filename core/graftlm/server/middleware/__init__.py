"""The layers that every HTTP request passes before its handler.

The layers are plain ASGI applications, so that streams and disconnects pass through them unchanged.
"""

from graftlm.server.middleware.auth import ApiKeyAuth, require_admin, require_operator
from graftlm.server.middleware.body_limit import BodyLimit
from graftlm.server.middleware.hosts import HostGuard
from graftlm.server.middleware.origins import OriginGuard
from graftlm.server.middleware.request_log import PROBES, RequestLog

__all__ = [
    "PROBES",
    "ApiKeyAuth",
    "BodyLimit",
    "HostGuard",
    "OriginGuard",
    "RequestLog",
    "require_admin",
    "require_operator",
]
