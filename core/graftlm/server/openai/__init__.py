"""OpenAI's API."""

from graftlm.server.openai.routes import make_router

__all__ = ["make_router"]
