"""The native API, which uses the names and formats of SGLang's HTTP interface."""

from graftlm.server.native.routes import make_router

__all__ = ["make_router"]
