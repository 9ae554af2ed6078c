"""OpenAI's Responses API."""

from graftlm.server.openai.responses.routes import make_router

__all__ = ["make_router"]
