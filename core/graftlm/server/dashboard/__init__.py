"""The page at `/`, which shows the current activity of the server."""

from graftlm.server.dashboard.history import History
from graftlm.server.dashboard.pages import PAGE_PATHS
from graftlm.server.dashboard.routes import make_router

__all__ = ["PAGE_PATHS", "History", "make_router"]
