"""Stop strings: where a growing text ends."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StopMatch", "StopStrings"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What a push did.

    Attributes:
        text: new text that is safe to show; no later text can make it part of a match.
        matched: the stop string that ended the text, or None.
    """

    text: str
    matched: str | None


class StopStrings:
    """Looks for several strings in one growing text, however it is cut into pieces.

    The match that is complete first wins; of those complete at the same character, the one listed first. The result
    does not depend on how the text is cut. Text that may be the beginning of a match is held back.

    Each string is followed by an automaton (Knuth, Morris and Pratt, SIAM J. Comput. 6(2), 1977), so a character costs
    the same however long the strings are.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Look for `stops`, each not empty; `include_stop` keeps the matched one in the text."""
        self._trackers = [_Tracker(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, armed: bool = True) -> StopMatch:
        """Add text.

        Args:
            text: what follows the text pushed before.
            armed: whether a string that is complete within this text ends it; if not, it passes as text.

        Returns: what may be shown now. After a match, text past it is dropped, and nothing may be pushed any more.
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
        """Return what is held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held


class _Tracker:
    """How much of one string the text ends with."""

    __slots__ = ("_fallback", "matched_len", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_len = 0  # the longest proper prefix of the pattern that the text ends with
        self._fallback = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Add a character to the text; True when the text now ends with the whole pattern."""
        size = self.matched_len
        while size and self.pattern[size] != character:
            size = self._fallback[size]
        size += self.pattern[size] == character
        complete = size == len(self.pattern)
        self.matched_len = self._fallback[size] if complete else size
        return complete


def _borders(pattern: str) -> list[int]:
    """For each length n: the longest proper prefix of pattern[:n] that is its suffix too."""
    borders = [0, 0]
    for end in range(1, len(pattern)):
        size = borders[end]
        while size and pattern[size] != pattern[end]:
            size = borders[size]
        borders.append(size + (pattern[size] == pattern[end]))
    return borders
