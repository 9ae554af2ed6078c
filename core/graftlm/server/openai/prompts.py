"""The prompts of a request. A request may contain several prompts."""

from typing import Any

import numpy as np

from graftlm.errors import InvalidPromptError
from graftlm.types import TokenIds

__all__ = ["split_prompts"]


def split_prompts(value: Any) -> list[str | TokenIds]:
    """Return the prompts in the value of a field: a text, an array of token ids, or a list of texts or arrays.

    Raises:
        InvalidPromptError: the list or the array is empty.
    """
    if isinstance(value, str):
        return [value]
    if not len(value):
        raise InvalidPromptError("the prompt is empty; give some text or token ids")
    return [value] if isinstance(value, np.ndarray) else list(value)
