"""What users may write as prompts, told apart by shape."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvalidPromptError
from graftlm.types import Message

__all__ = ["Prompt", "Prompts", "is_chat", "split_prompts"]

#: Text, token ids, or a chat.
Prompt: TypeAlias = str | Sequence[int] | NDArray[Any] | Sequence[Message]
#: One prompt or a list of them.
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """Return the prompts of one call as a list.

    "text", [1, 2, 3] and [{"role": ...}] are one prompt each; a list of any of them is several.

    Raises:
        InvalidPromptError: it is neither.
    """
    if isinstance(prompts, str) or is_chat(prompts):
        return [prompts]
    if isinstance(prompts, np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidPromptError(
            f"a prompt is text, a list of token ids or a list of chat messages, got {type(prompts).__name__}"
        )
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
