"""The paths of Anthropic's API."""

from typing import Final

__all__ = ["COUNT_TOKENS_PATH", "MESSAGES_PATH", "is_messages_path"]

MESSAGES_PATH: Final = "/v1/messages"
COUNT_TOKENS_PATH: Final = f"{MESSAGES_PATH}/count_tokens"


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
