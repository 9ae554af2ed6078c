"""What a model thinks before it answers, kept apart from the answer."""

from dataclasses import replace
from typing import Final

from graftlm.chat.reasoning import ReasoningSplitter, check_model_type
from graftlm.lang.backend import Generation

__all__ = ["REASONING_SUFFIX", "Thoughts", "check_model_type"]

#: Behind a variable's name: the variable of the reasoning that led to it. Also its key in `meta_info`.
REASONING_SUFFIX: Final = "_reasoning_content"
_KEY: Final = "reasoning_content"


class Thoughts:
    """Takes the reasoning out of one completion, which may grow."""

    def __init__(self, model_type: str, prompt: str) -> None:
        self._splitter = ReasoningSplitter(model_type, prompt)

    def out_of(self, generation: Generation) -> Generation:
        """Return a completion without its reasoning, which is in `meta_info` as `reasoning_content`.

        Where the backend has told the two apart, as chat endpoints do, its word counts.
        """
        if _KEY in generation.meta_info:
            return generation
        self._splitter.take(generation.text, is_whole=generation.meta_info.get("finish_reason") is not None)
        meta_info = generation.meta_info | {_KEY: self._splitter.reasoning}
        return replace(generation, text=self._splitter.answer, meta_info=meta_info)
