"""Deterministic automata that find the first match in a growing text."""

from collections import deque
from functools import lru_cache
from typing import Final

from graftlm.stop_patterns.nfa import Nfa, build_nfa

__all__ = ["MAX_MATCH_CHARS", "Automaton", "PatternTracker", "compile_pattern"]

#: Maximum number of characters that a match removes from a text, and that are held back for it.
MAX_MATCH_CHARS: Final = 4096

#: Maximum number of stored transitions of an automaton. When it is reached, they are computed anew.
_MAX_TRANSITIONS: Final = 10_000
#: Maximum number of automata that are kept for later requests. A hostile one needs about 10 MB.
_MAX_AUTOMATA: Final = 64


class _State:
    """A state of the deterministic automaton, after some text.

    Attributes:
        begun: states of the partial matches that began before this position, in ascending order.
        fresh: states of a match that begins at this position.
        is_match: whether a match ends at this position.
        next: character -> next state, as far as computed.
    """

    __slots__ = ("begun", "fresh", "is_match", "next")

    def __init__(self, begun: bytes, fresh: tuple[int, ...], is_match: bool) -> None:
        self.begun = begun
        self.fresh = fresh
        self.is_match = is_match
        self.next: dict[str, _State] = {}


class Automaton:
    """The deterministic automaton of a pattern. Its states are made when a text reaches them, and then shared.

    A character costs one lookup in a dictionary. A new transition costs time proportional to the pattern's size.
    """

    def __init__(self, pattern: str) -> None:
        """Compile a pattern.

        Raises:
            PatternError: the pattern cannot end a growing text.
        """
        self.pattern = pattern
        self._nfa: Nfa = build_nfa(pattern)
        self._fresh = {
            is_line_start: self._nfa.closure((0,), at_text_start=False, at_line_start=is_line_start)
            for is_line_start in (False, True)
        }
        self.initial = _State(b"", self._nfa.closure((0,), at_text_start=True, at_line_start=True), is_match=False)
        self._states: dict[tuple[bytes, bool], _State] = {}
        self._num_transitions = 0

    @property
    def num_states(self) -> int:
        """Number of states of the nondeterministic automaton."""
        return len(self._nfa.steps)

    @property
    def fresh_inside(self) -> tuple[int, ...]:
        """States of a match that begins inside a line."""
        return self._fresh[False]

    def step(self, state: _State, character: str) -> _State:
        """Return the state after one more character."""
        found = state.next.get(character)
        if found is not None:
            return found
        if self._num_transitions >= _MAX_TRANSITIONS:
            self._states.clear()
            self.initial = _State(b"", self.initial.fresh, is_match=False)
            self._num_transitions = 0
        is_line_start = character == "\n"
        # One byte per state, because there are at most `MAX_STATES`.
        begun = bytes(sorted(self._moved((*state.begun, *state.fresh), character)))
        key = begun, is_line_start
        new = self._states.get(key)
        if new is None:
            new = _State(begun, self._fresh[is_line_start], self._nfa.accept in begun)
            self._states[key] = new
        state.next[character] = new
        self._num_transitions += 1
        return new

    def first_start(self, text: str, fresh: tuple[int, ...]) -> int | None:
        """Return the earliest start of the matches that end with `text`; None if there is none.

        Args:
            text: text in which no match ends earlier.
            fresh: states of a match that begins with `text`.
        """
        nfa, first = self._nfa, None
        ends = frozenset((nfa.accept,))  # states from which the rest of the text leads to the end of the match
        known: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        for position in range(len(text) - 1, -1, -1):
            character = text[position]
            found = known.get((ends, character))
            if found is None:
                found = known[ends, character] = nfa.sources(ends, character)
            ends = found
            if not ends:
                break
            if not ends.isdisjoint(fresh if position == 0 else self._fresh[text[position - 1] == "\n"]):
                first = position
        return first

    def _moved(self, states: tuple[int, ...], character: str) -> tuple[int, ...]:
        """Return the states after a character. States from which no match began are not included."""
        steps = self._nfa.steps
        targets = [target for state in states for test, target in steps[state] if test(character)]
        return self._nfa.closure(targets, at_text_start=False, at_line_start=character == "\n")


@lru_cache(maxsize=_MAX_AUTOMATA)
def compile_pattern(pattern: str) -> Automaton:
    """Return the automaton of a pattern. Requests with the same pattern share it.

    Raises:
        PatternError: the pattern cannot end a growing text.
    """
    return Automaton(pattern)


class PatternTracker:
    """Searches one text for the first match of a pattern.

    Attributes:
        pattern: the pattern.
    """

    def __init__(self, automaton: Automaton) -> None:
        self.pattern = automaton.pattern
        self._automaton = automaton
        self._state = automaton.initial
        self._fresh = automaton.initial.fresh  # states of a match that begins where the held text begins
        self._held: deque[str] = deque(maxlen=MAX_MATCH_CHARS)

    def advance(self, character: str) -> bool:
        """Add a character to the text. Returns: whether a match ends with it."""
        state = self._state.next.get(character) or self._automaton.step(self._state, character)
        self._state = state
        if not state.begun:
            self._held.clear()
            self._fresh = state.fresh
            return False
        if len(self._held) == MAX_MATCH_CHARS:
            self._fresh = self._automaton.fresh_inside
        self._held.append(character)
        return state.is_match

    @property
    def held_len(self) -> int:
        """Number of characters at the end of the text that may be the start of a match."""
        return len(self._held)

    @property
    def match_len(self) -> int:
        """Number of characters of the match that has just been completed, at most `MAX_MATCH_CHARS`."""
        held = "".join(self._held)
        return len(held) - (self._automaton.first_start(held, self._fresh) or 0)
