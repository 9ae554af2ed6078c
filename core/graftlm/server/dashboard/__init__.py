"""The page at `/`, which draws what the server does at the moment."""

from graftlm.server.dashboard.pages import PAGE_PATHS
from graftlm.server.dashboard.routes import make_router

__all__ = ["PAGE_PATHS", "make_router"]
