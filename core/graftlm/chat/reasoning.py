"""Splits a model's text into reasoning and answer, by model type."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final

from graftlm.contracts import ChatFormatContext, ContentDelta, ReasoningDelta, ReasoningFormat
from graftlm.errors import RequestError
from graftlm.registry import Registry

__all__ = ["ReasoningSplitter", "check_model_type"]

#: Model type in SGLang -> (reasoning format, whether every output begins with reasoning, for any prompt).
_MODEL_TYPES: Final[Mapping[str, tuple[str, bool]]] = {
    "deepseek-r1": ("think", True),
    "deepseek-v3": ("think", False),
    "glm45": ("think", False),
    "qwen3": ("think", False),
    "qwen3-thinking": ("think", True),
}


class ReasoningSplitter:
    """Splits one completion into reasoning and answer while it is generated.

    Attributes:
        reasoning: the reasoning so far.
        answer: the answer so far.
    """

    def __init__(self, model_type: str, prompt: str) -> None:
        """Create a splitter for the text after a prompt, which may leave the reasoning open.

        Args:
            model_type: a model type of SGLang, or the name of an installed reasoning format.
        """
        reasoning_format, is_open = _format(model_type)
        self._parser = reasoning_format.parser(is_open=is_open or reasoning_format.is_open(prompt))
        self._taken_len = 0
        self._is_whole = False
        self.reasoning = ""
        self.answer = ""

    def take(self, text: str, *, is_whole: bool) -> None:
        """Parse the new part of a completion.

        Args:
            text: the completion so far.
            is_whole: whether the completion ends here.
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
    """Check that a model type is known.

    Raises:
        RequestError: the model type is unknown.
    """
    formats = _registry().names("reasoning")
    if model_type not in (*_MODEL_TYPES, *formats):
        raise RequestError(
            f"model_type must be one of {', '.join(_MODEL_TYPES)}, or a reasoning format ({', '.join(formats)}), got "
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
    """Return the installed plugins; loaded once, on first use."""
    return Registry.load()
