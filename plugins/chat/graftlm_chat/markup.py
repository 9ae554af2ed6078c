"""What stands around the JSON objects of tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["Markup", "Outcome", "Word", "match_words"]


@dataclass(frozen=True, slots=True)
class Word:
    """A literal piece of text, with any white space before it."""

    text: str
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Markup:
    """How the JSON objects of calls are opened, parted and closed; the object's own brace excluded.

    Attributes:
        marker: begins a group of calls, anywhere.
        is_bare: whether the marker may be left out where the calls are all that the model writes: detokenising has
            dropped it.
        opening: words between the marker and the first object.
        separator: words between an object and the next; None when each has a marker of its own.
        closing: words after the last object.
    """

    marker: str
    is_bare: bool = False
    opening: tuple[Word, ...] = ()
    separator: tuple[Word, ...] | None = None
    closing: tuple[Word, ...] = ()


class Outcome(Enum):
    """Whether a text begins with some words."""

    YES = auto()
    NO = auto()
    #: The text is too short to tell.
    OPEN = auto()


def match_words(text: str, words: Sequence[Word]) -> tuple[Outcome, int]:
    """Match the beginning of a text that goes on; returns the index after the last word, if they are there."""
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
