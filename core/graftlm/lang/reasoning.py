"""Separates a model's reasoning from its answer."""

from dataclasses import replace
from typing import Final

from graftlm.chat.reasoning import ReasoningSplitter, check_model_type
from graftlm.lang.backend import Generation

__all__ = ["REASONING_SUFFIX", "ReasoningFilter", "check_model_type"]

#: The reasoning before the text of variable `x` is stored in the variable `x` + this suffix.
REASONING_SUFFIX: Final = "_reasoning_content"
_KEY: Final = "reasoning_content"


class ReasoningFilter:
    """Removes the reasoning from one completion, which may grow."""

    def __init__(self, model_type: str, prompt: str) -> None:
        self._splitter = ReasoningSplitter(model_type, prompt)

    def apply(self, generation: Generation) -> Generation:
        """Return a completion without its reasoning, which is added to `meta_info` as `reasoning_content`.

        If the backend has already separated the reasoning, as chat endpoints do, the completion is returned unchanged.
        """
        if _KEY in generation.meta_info:
            return generation
        self._splitter.take(generation.text, is_whole=generation.meta_info.get("finish_reason") is not None)
        meta_info = generation.meta_info | {_KEY: self._splitter.reasoning}
        return replace(generation, text=self._splitter.answer, meta_info=meta_info)
