"""The native API: the names and shapes of SGLang's HTTP interface."""

from graftlm.server.native.routes import make_router

__all__ = ["make_router"]
