"""Anthropic's Messages API."""

from graftlm.server.anthropic.error_shape import AnthropicErrors
from graftlm.server.anthropic.messages import make_router
from graftlm.server.anthropic.paths import MESSAGES_PATH, is_messages_path

__all__ = ["MESSAGES_PATH", "AnthropicErrors", "is_messages_path", "make_router"]
