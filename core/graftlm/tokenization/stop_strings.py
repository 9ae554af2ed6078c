"""Finds stop strings and stop patterns in a growing text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graftlm.stop_patterns import PatternTracker, compile_pattern

__all__ = ["StopMatch", "StopStrings"]


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The result of a push.

    `StopStrings.push` returns it.

    Attributes:
        text: new text that cannot become part of a match.
        matched: the stop string or pattern that ended the text, or None.
    """

    text: str
    matched: str | None


class _Search(Protocol):
    """The search of one string or pattern."""

    @property
    def pattern(self) -> str:
        """The string or the pattern."""
        ...

    @property
    def held_len(self) -> int:
        """Number of characters at the end of the text that may be the start of a match."""
        ...

    @property
    def match_len(self) -> int:
        """Number of characters of the match that has just been completed."""
        ...

    def advance(self, character: str) -> bool:
        """Add a character to the text. Returns: whether a match ends with it."""
        ...


class StopStrings:
    """Searches several strings and patterns in one growing text.

    The match that is complete first is used. If several are complete at the same character, the first in the list is
    used; strings come before patterns. The result does not depend on how the text is cut into pieces. Text that may be
    the start of a match is held back.

    One automaton per string (Knuth, Morris and Pratt, SIAM J. Comput. 6(2), 1977) makes the cost per character
    independent of the strings' lengths. `graftlm.stop_patterns` has the automata of patterns.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False, patterns: Sequence[str] = ()) -> None:
        """Create a search.

        Args:
            stops: strings that are not empty.
            include_stop: whether the match is kept in the text.
            patterns: valid patterns for `compile_pattern`.
        """
        self._trackers: list[_Search] = [_Tracker(stop) for stop in stops]
        self._trackers += [PatternTracker(compile_pattern(pattern)) for pattern in patterns]
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, armed: bool = True) -> StopMatch:
        """Add text.

        Args:
            text: continuation of the text that was pushed before.
            armed: whether a match that is completed by this text counts; if not, it is normal text.

        Returns: the text that is final now. Text after a match is dropped, and `push` must not be called afterwards.
        """
        if not self._trackers:
            return StopMatch(text, None)
        whole = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [tracker for tracker in self._trackers if tracker.advance(character)]
            if complete and armed:
                self._held = ""
                size = end if self._include_stop else end - complete[0].match_len
                return StopMatch(whole[:size], complete[0].pattern)
        safe = len(whole) - max(tracker.held_len for tracker in self._trackers)
        self._held = whole[safe:]
        return StopMatch(whole[:safe], None)

    def finish(self) -> str:
        """End the text. Returns: the text that was held back, which contains no match."""
        held, self._held = self._held, ""
        return held


class _Tracker:
    """Tracks the longest prefix of one string with which the text ends."""

    __slots__ = ("_fallback", "held_len", "match_len", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.match_len = len(pattern)
        self.held_len = 0  # length of the longest proper prefix of the pattern with which the text ends
        self._fallback = _borders(pattern)

    def advance(self, character: str) -> bool:
        """Add a character to the text. Returns: whether the text now ends with the whole pattern."""
        size = self.held_len
        while size and self.pattern[size] != character:
            size = self._fallback[size]
        size += self.pattern[size] == character
        complete = size == len(self.pattern)
        self.held_len = self._fallback[size] if complete else size
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
