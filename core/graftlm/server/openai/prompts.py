"""One prompt or several, told apart by shape."""

from typing import Any

from graftlm.errors import InvalidPromptError

__all__ = ["split_prompts"]


def split_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of "text", ["text", ...], [1, 2, ...] or [[1, 2], ...].

    Raises:
        InvalidPromptError: there is none.
    """
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidPromptError("the prompt is empty; give some text or token ids")
    return [value] if isinstance(value[0], int) else list(value)
