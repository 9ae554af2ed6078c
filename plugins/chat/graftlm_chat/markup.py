"""The text around the JSON objects of tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Markup", "Outcome", "Word", "match_words"]


@dataclass(frozen=True, slots=True)
class Word:
    """A literal text that may follow any white space."""

    text: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Markup:
    """The words before, between and after the JSON objects of calls, without the objects' braces.

    Attributes:
        marker: text that starts a group of calls, at any position.
        is_bare: whether the marker may be missing if the text consists only of calls. It is missing if the marker is a
            special token, because detokenization removes special tokens.
        opening: words between the marker and the first object.
        separator: words between two objects; None if each object has its own marker.
        closing: words after the last object.
    """

    marker: str
    is_bare: bool = False
    opening: tuple[Word, ...] = ()
    separator: tuple[Word, ...] | None = None
    closing: tuple[Word, ...] = ()


class Outcome(Enum):
    """The result of a comparison: whether a text starts with given words."""

    YES = auto()
    NO = auto()
    #: The text is too short to decide.
    OPEN = auto()


def match_words(text: str, words: Sequence[Word]) -> tuple[Outcome, int]:
    """Match words with the start of a text that may still grow.

    Returns: the outcome, and the index after the last word (0 unless the outcome is YES).
    """
    at = 0
    for word in words:
        rest = text[at:].lstrip()
        if rest.startswith(word.text):
            at = len(text) - len(rest) + len(word.text)
        elif word.text.startswith(rest):
            return Outcome.OPEN, 0
        elif not word.is_optional:
            return Outcome.NO, 0
    return Outcome.YES, at
