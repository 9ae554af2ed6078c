"""The backend for OpenAI-compatible endpoints."""

from graftlm.lang.backends.openai.backend import OpenAI

__all__ = ["OpenAI"]
