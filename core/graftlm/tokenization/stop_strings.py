"""Finds stop strings in a growing text."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopMatch", "StopStrings"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The result of a push.

    Attributes:
        text: new text that cannot become part of a match.
        matched: the stop string that ended the text, or None.
    """

    text: str
    matched: str | None


class StopStrings:
    """Searches several strings in one growing text.

    The match that is complete first is used. If several are complete at the same character, the first in the list is
    used. The result does not depend on how the text is cut into pieces. Text that may be the start of a match is held
    back.

    One automaton per string (Knuth, Morris and Pratt, SIAM J. Comput. 6(2), 1977) makes the cost per character
    independent of the strings' lengths.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Create a search for `stops`, which are not empty; `include_stop` keeps the matched string in the text."""
        self._trackers = [_Tracker(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, armed: bool = True) -> StopMatch:
        """Add text.

        Args:
            text: continuation of the text that was pushed before.
            armed: whether a string that is completed by this text is a match; if not, it is normal text.

        Returns: the text that is final now. Text after a match is dropped, and `push` must not be called afterwards.
        """
        if not self._trackers:
            return StopMatch(text, None)
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [tracker.pattern for tracker in self._trackers if tracker.advance(character)]
            if complete and armed:
                self._held = ""
                return StopMatch(whole[: end if self._include_stop else end - len(complete[0])], complete[0])
        safe = len(whole) - max(tracker.matched_len for tracker in self._trackers)
        self._held = whole[safe:]
        return StopMatch(whole[:safe], None)

    def finish(self) -> str:
        """End the text. Returns: the text that was held back; it contains no complete stop string."""
        held, self._held = self._held, ""
        return held


class _Tracker:
    """Tracks the longest prefix of one string with which the text ends."""

    __slots__ = ("_fallback", "matched_len", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_len = 0  # length of the longest proper prefix of the pattern with which the text ends
        self._fallback = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Add a character to the text. Returns: whether the text now ends with the whole pattern."""
        size = self.matched_len
        while size and self.pattern[size] != character:
            size = self._fallback[size]
        size += self.pattern[size] == character
        complete = size == len(self.pattern)
        self.matched_len = self._fallback[size] if complete else size
        return complete


def _borders(pattern: str) -> list[int]:
    """Return for each length n the length of the longest proper prefix of pattern[:n] that is also its suffix."""
    borders = [0, 0]
    for end in range(1, len(pattern)):
        size = borders[end]
        while size and pattern[size] != pattern[end]:
            size = borders[size]
        borders.append(size + (pattern[size] == pattern[end]))
    return borders
