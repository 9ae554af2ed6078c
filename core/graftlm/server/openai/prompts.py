"""The prompts of a request; a request may contain several."""

from typing import Any

import numpy as np

from graftlm.errors import InvalidPromptError
from graftlm.types import TokenIds

__all__ = ["split_prompts"]


def split_prompts(value: Any) -> list[str | TokenIds]:
    """Return the prompts of one text, one array of token ids, or a list of either.

    Raises:
        InvalidPromptError: there is no prompt, or it is an empty list.
    """
    if isinstance(value, str):
        return [value]
    if not len(value):
        raise InvalidPromptError("the prompt is empty; give some text or token ids")
    return [value] if isinstance(value, np.ndarray) else list(value)
