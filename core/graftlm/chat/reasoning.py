"""Parting a model's text into its reasoning and its answer, by the name of the model's kind."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

from graftlm.contracts import ChatFormatContext, ContentDelta, ReasoningDelta, ReasoningFormat
from graftlm.errors import RequestError
from graftlm.registry import Registry

__all__ = ["ReasoningSplitter", "check_model_type"]

#: Kinds of models under SGLang's names -> reasoning format, and whether every answer begins within the reasoning,
#: whatever the prompt ends with.
_MODEL_TYPES: Final[Mapping[str, tuple[str, bool]]] = {
    "deepseek-r1": ("think", True),
    "deepseek-v3": ("think", False),
    "glm45": ("think", False),
    "qwen3": ("think", False),
    "qwen3-thinking": ("think", True),
}


class ReasoningSplitter:
    """Parts one completion as it comes.

    Attributes:
        reasoning: so far.
        answer: so far.
    """

    def __init__(self, model_type: str, prompt: str) -> None:
        """Begin behind a prompt, which may leave the reasoning open.

        Args:
            model_type: one of SGLang's names, or the name of an installed reasoning format.
        """
        reasoning_format, is_open = _format(model_type)
        self._parser = reasoning_format.parser(is_open=is_open or reasoning_format.is_open(prompt))
        self._taken_len = 0
        self._is_whole = False
        self.reasoning = ""
        self.answer = ""

    def take(self, text: str, *, is_whole: bool) -> None:
        """Take in a completion so far.

        Args:
            is_whole: it ends here.
        """
        self._add(self._parser.push(text[self._taken_len :]) if len(text) > self._taken_len else ())
        self._taken_len = len(text)
        if is_whole and not self._is_whole:
            self._is_whole = True
            self._add(self._parser.finish())

    def _add(self, deltas: Iterable[ReasoningDelta | ContentDelta]) -> None:
        for delta in deltas:
            match delta:
                case ReasoningDelta(text):
                    self.reasoning += text
                case ContentDelta(text):
                    self.answer += text


def check_model_type(model_type: str) -> None:
    """Check that a kind of models is known.

    Raises:
        RequestError: it is not.
    """
    formats = _registry().names("reasoning")
    if model_type not in (*_MODEL_TYPES, *formats):
        raise RequestError(
            f"model_type must be one of {', '.join(_MODEL_TYPES)}, or a reasoning format: {', '.join(formats)}; got "
            f"{model_type!r}"
        )


def _format(model_type: str) -> tuple[ReasoningFormat, bool]:
    name, is_open = _MODEL_TYPES.get(model_type, (model_type, False))
    registry = _registry()
    created: ReasoningFormat = registry.create(
        "reasoning", registry.provider("reasoning", name), {}, ChatFormatContext()
    )
    return created, is_open


@cache
def _registry() -> Registry:
    """Return the installed plugins, as of the first use."""
    return Registry.load()
