"""The files of the dashboard's page, with header fields that restrict the page's rights in the browser."""

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response

__all__ = ["PAGE_PATHS", "make_router"]

_FOLDER: Final = Path(__file__).parent / "page"

_CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}

#: Path of the URL -> name of the file.
_FILES: Final = {
    "/": "index.html",
    "/dashboard/dashboard.css": "dashboard.css",
    "/dashboard/dashboard.js": "dashboard.js",
    "/dashboard/api.js": "api.js",
    "/dashboard/chart.js": "chart.js",
    "/dashboard/chat.js": "chat.js",
    "/dashboard/elements.js": "elements.js",
    "/dashboard/replicas.js": "replicas.js",
    "/dashboard/tree.js": "tree.js",
}

#: Paths that a browser loads before the user can enter an API key. The files contain no server data.
PAGE_PATHS: Final = frozenset(_FILES)

#: The page may load its own files and call its own server. It shows texts of clients; scripts in them must not run.
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_router() -> APIRouter:
    """Return a router with a route for each file."""
    router = APIRouter(include_in_schema=False)
    for path, name in _FILES.items():
        _add_file(router, path, _FOLDER / name)
    return router


def _add_file(router: APIRouter, path: str, file: Path) -> None:
    body, headers = file.read_bytes(), _HEADERS | {"Content-Type": _CONTENT_TYPES[file.suffix]}

    @router.get(path)
    async def read_file() -> Response:
        return Response(body, headers=headers)
