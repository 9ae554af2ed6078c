"""Programs on endpoints that speak OpenAI's HTTP API."""

from graftlm.lang.backends.openai.backend import OpenAI

__all__ = ["OpenAI"]
