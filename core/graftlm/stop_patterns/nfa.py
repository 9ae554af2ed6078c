"""Nondeterministic automata of regular expressions in the syntax of Python's `re`."""

import operator
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial

# The standard library's parser has no public name. It has been the same since Python 3.11.
from re import _constants as codes
from re import _parser as parser
from typing import Any, Final, TypeVar

__all__ = ["MAX_STATES", "Nfa", "PatternError", "When", "build_nfa"]

#: Maximum number of an automaton's states. A step of the text costs at most this number of comparisons.
MAX_STATES: Final = 256

CharTest = Callable[[str], object]
_Label = TypeVar("_Label")

#: Flags that change which characters match.
_CHAR_FLAGS: Final = re.IGNORECASE | re.DOTALL | re.ASCII
_CATEGORIES: Final = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
#: Constructs without an automaton -> their name in messages.
_UNSUPPORTED: Final = {
    codes.ASSERT: "lookahead and lookbehind",
    codes.ASSERT_NOT: "lookahead and lookbehind",
    codes.GROUPREF: "references to groups",
    codes.GROUPREF_EXISTS: "conditions on groups",
    codes.ATOMIC_GROUP: "atomic groups",
    codes.POSSESSIVE_REPEAT: "possessive repetition",
}
_ENDS: Final = {
    codes.AT_END: "$",
    codes.AT_END_STRING: r"\Z",
    codes.AT_BOUNDARY: r"\b",
    codes.AT_NON_BOUNDARY: r"\B",
}


class PatternError(ValueError):
    """The error of a pattern that cannot end a growing text. The message has the reason, without the pattern."""


class When(Enum):
    """The condition of a transition that reads no character."""

    ALWAYS = "always"
    TEXT_START = "text start"
    LINE_START = "line start"


@dataclass
class Nfa:
    """An automaton whose state 0 is the start.

    Attributes:
        steps: state -> (test of a character, next state).
        jumps: state -> (condition, next state) without a character.
        accept: the state at the end of a match.
    """

    steps: list[list[tuple[CharTest, int]]] = field(default_factory=list)
    jumps: list[list[tuple[When, int]]] = field(default_factory=list)
    accept: int = 0

    def closure(self, states: Iterable[int], at_text_start: bool, at_line_start: bool) -> tuple[int, ...]:
        """Return these states and all that are reached from them without a character, in the order of discovery."""
        holds = {When.ALWAYS: True, When.TEXT_START: at_text_start, When.LINE_START: at_line_start}
        found: dict[int, None] = {}
        stack = list(states)[::-1]
        while stack:
            state = stack.pop()
            if state not in found:
                found[state] = None
                stack += [target for when, target in self.jumps[state] if holds[when]]
        return tuple(found)

    def sources(self, targets: Iterable[int], character: str) -> frozenset[int]:
        """Return the states from which reading a character inside the text leads to one of these states."""
        holds = {When.ALWAYS: True, When.TEXT_START: False, When.LINE_START: character == "\n"}
        found = set(targets)
        stack = list(found)
        while stack:
            for when, source in self._jumps_to[stack.pop()]:
                if holds[when] and source not in found:
                    found.add(source)
                    stack.append(source)
        return frozenset(source for target in found for test, source in self._steps_to[target] if test(character))

    @cached_property
    def _jumps_to(self) -> list[list[tuple[When, int]]]:
        return _reversed(self.jumps)

    @cached_property
    def _steps_to(self) -> list[list[tuple[CharTest, int]]]:
        return _reversed(self.steps)


def _reversed(edges: list[list[tuple[_Label, int]]]) -> list[list[tuple[_Label, int]]]:
    """Return for each state the (label, source) pairs of the edges that lead to it."""
    found: list[list[tuple[_Label, int]]] = [[] for _ in edges]
    for source, targets in enumerate(edges):
        for label, target in targets:
            found[target].append((label, source))
    return found


def build_nfa(pattern: str) -> Nfa:
    """Return the automaton of a pattern.

    Raises:
        PatternError: the pattern is invalid, too large, matches the empty text, or needs the text after a match.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that may change in a later Python
            parsed = parser.parse(pattern)
        nfa = _Builder(parsed.state.flags).build(parsed)
    except (re.error, OverflowError) as error:
        raise PatternError(f"is not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError("is nested too deeply") from None
    if nfa.accept in nfa.closure((0,), at_text_start=True, at_line_start=True):
        raise PatternError("matches the empty text, so it would end every output at once")
    return nfa


class _Builder:
    """Builds an automaton by Thompson's construction (Comm. ACM 11(6), 1968)."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._nfa = Nfa()

    def build(self, parsed: Any) -> Nfa:
        start = self._new_state()
        self._nfa.accept = self._sequence(parsed, start, self._flags)
        return self._nfa

    def _new_state(self) -> int:
        if len(self._nfa.steps) == MAX_STATES:
            raise PatternError(f"needs more than {MAX_STATES} states; shorten it, or lower its repetition counts")
        self._nfa.steps.append([])
        self._nfa.jumps.append([])
        return len(self._nfa.steps) - 1

    def _jump(self, source: int, target: int, when: When = When.ALWAYS) -> None:
        self._nfa.jumps[source].append((when, target))

    def _sequence(self, parsed: Any, start: int, flags: int) -> int:
        """Add the parts of a pattern behind a state. Returns: the state at their end."""
        for operation, argument in parsed:
            start = self._part(operation, argument, start, flags)
        return start

    def _part(self, operation: Any, argument: Any, start: int, flags: int) -> int:
        if operation is codes.BRANCH:
            return self._branch(argument[1], start, flags)
        if operation is codes.SUBPATTERN:
            _, added, removed, inner = argument
            kept = flags & ~re.ASCII if added & re.UNICODE else flags  # `(?u:` ends the effect of `(?a)`
            return self._sequence(inner, start, (kept | added) & ~removed)
        if operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):  # a greedy and a lazy match are complete together
            fewest, most, inner = argument
            return self._repeat(fewest, most, inner, start, flags)
        if operation is codes.AT:
            return self._anchor(argument, start, flags)
        if operation in _UNSUPPORTED:
            raise PatternError(f"has {_UNSUPPORTED[operation]}, which cannot be matched in linear time")
        end = self._new_state()
        self._nfa.steps[start].append((_char_test(operation, argument, flags), end))
        return end

    def _branch(self, alternatives: Sequence[Any], start: int, flags: int) -> int:
        ends = []
        for alternative in alternatives:
            begin = self._new_state()
            self._jump(start, begin)
            ends.append(self._sequence(alternative, begin, flags))
        end = self._new_state()
        for one in ends:
            self._jump(one, end)
        return end

    def _repeat(self, fewest: int, most: Any, inner: Any, start: int, flags: int) -> int:
        if not _reads(inner):  # it would be repeated up to 2**32 times without reaching the limit of states
            return start
        for _ in range(fewest):
            start = self._sequence(inner, start, flags)
        if most is codes.MAXREPEAT:
            loop = self._new_state()
            self._jump(start, loop)
            self._jump(self._sequence(inner, loop, flags), loop)
            return loop
        end = self._new_state()
        for _ in range(most - fewest):
            self._jump(start, end)
            start = self._sequence(inner, start, flags)
        self._jump(start, end)
        return end

    def _anchor(self, code: Any, start: int, flags: int) -> int:
        if code in _ENDS:
            raise PatternError(
                f"has {_ENDS[code]}, which depends on the text after it; a stop pattern ends the output where it "
                "matches, so leave it out"
            )
        multiline = code is codes.AT_BEGINNING and flags & re.MULTILINE
        end = self._new_state()
        self._jump(start, end, When.LINE_START if multiline else When.TEXT_START)
        return end


def _reads(parsed: Any) -> bool:
    """Return whether a part has a construct that adds states."""
    for operation, argument in parsed:
        if operation is codes.SUBPATTERN:
            inner = argument[3]
        elif operation in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            inner = argument[2]
        else:
            return True
        if _reads(inner):
            return True
    return False


def _char_test(operation: Any, argument: Any, flags: int) -> CharTest:
    """Return a function that says whether a character matches a part of a pattern."""
    if operation is codes.LITERAL and not flags & re.IGNORECASE:
        return partial(operator.eq, chr(argument))
    if operation is codes.ANY:
        text = "."
    elif operation is codes.LITERAL:
        text = _escaped(argument)
    elif operation is codes.NOT_LITERAL:
        text = f"[^{_escaped(argument)}]"
    else:
        assert operation is codes.IN, operation
        text = f"[{''.join([_class_part(*part) for part in argument])}]"
    return re.compile(text, flags & _CHAR_FLAGS).fullmatch


def _class_part(operation: Any, argument: Any) -> str:
    if operation is codes.NEGATE:
        return "^"
    if operation is codes.CATEGORY:
        return _CATEGORIES[argument]
    if operation is codes.RANGE:
        return f"{_escaped(argument[0])}-{_escaped(argument[1])}"
    return _escaped(argument)


def _escaped(code_point: int) -> str:
    return f"\\U{code_point:08x}"
