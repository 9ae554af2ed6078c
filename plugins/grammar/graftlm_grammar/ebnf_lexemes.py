"""Finds the parts of a grammar that a lexer can read by longest match, without changing the grammar's language.

A lexer uses the longest match and does not backtrack, so `[a-z]* "b"` as two lexemes would match nothing. A part can be
a lexeme only under two conditions. The first character of a match distinguishes the lexeme from all others. The first
character after a match shows that the match has ended. A part that does not satisfy both conditions is split into its
own parts, down to single characters, which are always lexemes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from graftlm_grammar.char_set import CharSet
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence
from graftlm_grammar.ebnf_regex import regex_of

__all__ = ["Lexemes"]

_ALL: Final = -1  # all bits are set


@dataclass(frozen=True, slots=True)
class _Shape:
    """The properties that decide whether a part can be a lexeme. Sets of characters are bit sets; see `_Alphabet`.

    Attributes:
        nullable: whether the empty text matches.
        first: characters with which a match can start.
        after: characters with which a complete match can continue to a longer match; all characters if unknown.
    """

    nullable: bool
    first: int
    after: int = 0


class _Alphabet:
    """Groups of characters that the grammar does not distinguish."""

    def __init__(self, sets: Iterable[CharSet]) -> None:
        self._sets = sets = list(sets)
        starts = sorted({bound for chars in sets for first, last in chars for bound in (first, last + 1)})
        self._idx = {start: i for i, start in enumerate(starts)}
        self._bits: dict[CharSet, int] = {}

    def bits(self, chars: CharSet) -> int:
        """Return one of the grammar's character sets as a bit set, with one bit per group."""
        if chars not in self._bits:
            self._bits[chars] = sum((1 << self._idx[last + 1]) - (1 << self._idx[first]) for first, last in chars)
        return self._bits[chars]


class Lexemes:
    """Decides which parts of a grammar are lexemes.

    Args:
        rules: all rules by name.
        regexes: the regular rules by name, as regular expressions.
    """

    def __init__(self, rules: Mapping[str, Expression], regexes: Mapping[str, str]) -> None:
        self._rules = rules
        self._regexes = regexes
        self._alphabet = _Alphabet(chars for rule in rules.values() for chars in _char_sets(rule))
        self._shape_of_rule: dict[str, _Shape] = {name: _Shape(False, 0) for name in rules}
        self._shapes: dict[int, _Shape] = {}
        self._regex_of: dict[int, str] = {}
        self._split: set[str] = set()
        self._single: set[str] = set()
        self._compute_shapes()
        while self._split_ambiguous():
            pass

    def regex(self, expression: Expression) -> str | None:
        """Return the regular expression of a part if the part is a lexeme, otherwise None."""
        if not self._is_regular(expression) or self._shape(expression).nullable:
            return None
        if id(expression) not in self._regex_of:
            # A reference to a rule is the same lexeme as the rule.
            self._regex_of[id(expression)] = (
                self._regexes[expression.name]
                if isinstance(expression, Reference)
                else regex_of(expression, self._regexes)
            )
        regex = self._regex_of[id(expression)]
        return None if regex in self._split and not isinstance(expression, Chars) else regex

    def _is_regular(self, expression: Expression) -> bool:
        match expression:
            case Chars():
                return True
            case Reference(name):
                return name in self._regexes
            case Repeated(item):
                return self._is_regular(item)
            case Sequence(parts) | Alternatives(parts):
                return all(self._is_regular(part) for part in parts)

    # -- shapes --------------------------------------------------------------------------------------------------------

    def _compute_shapes(self) -> None:
        """Update the shapes of all rules until none changes. This ends, because each change adds a bit."""
        changed = True
        while changed:
            changed = False
            for name, expression in self._rules.items():
                self._shapes.clear()
                shape = self._shape(expression)
                changed |= shape != self._shape_of_rule[name]
                self._shape_of_rule[name] = shape
        self._shapes.clear()

    def _shape(self, expression: Expression) -> _Shape:
        shape = self._shapes.get(id(expression))
        if shape is None:
            shape = self._shapes[id(expression)] = self._new_shape(expression)
        return shape

    def _new_shape(self, expression: Expression) -> _Shape:
        match expression:
            case Chars(chars):
                return _Shape(False, self._alphabet.bits(chars))
            case Reference(name):
                return self._shape_of_rule[name]
            case Sequence(items):
                shape = _Shape(True, 0)
                for item in items:
                    shape = _one_after_the_other(shape, self._shape(item))
                return shape
            case Alternatives(branches):
                shape = self._shape(branches[0])
                for branch in branches[1:]:
                    shape = _one_or_the_other(shape, self._shape(branch))
                return shape
            case Repeated(item, least, most):
                one = self._shape(item)
                again = one.after if most == 1 else _one_after_the_other(one, one).after | one.after | one.first
                return _Shape(least == 0 or one.nullable, one.first, again)

    # -- conflicts -----------------------------------------------------------------------------------------------------

    def _split_ambiguous(self) -> bool:
        """Find lexemes that a lexer might confuse, and split them. Returns whether there were any."""
        shapes, follow = self._lexemes()
        seen = several = 0
        for shape in shapes.values():
            several |= seen & shape.first
            seen |= shape.first
        ambiguous = {
            regex
            for regex, shape in shapes.items()
            if shape.after & follow[regex] or (shape.first & several and regex not in self._single)
        }
        self._split |= ambiguous
        return bool(ambiguous)

    def _lexemes(self) -> tuple[dict[str, _Shape], dict[str, int]]:
        """Return the lexemes with their shapes, and the characters that can follow each lexeme."""
        shapes: dict[str, _Shape] = {}
        follow: dict[str, int] = {}
        follow_of_rule = dict.fromkeys(self._rules, 0)
        changed = True
        while changed:
            changed = False
            for name, rule in self._rules.items():
                waiting: list[tuple[Expression, int]] = [] if name in self._regexes else [(rule, follow_of_rule[name])]
                while waiting:
                    part, after = waiting.pop()
                    regex = self.regex(part)
                    if regex is not None:
                        shapes[regex] = self._shape(part)
                        follow[regex] = follow.get(regex, 0) | after
                        if isinstance(part, Chars):
                            self._single.add(regex)
                    elif isinstance(part, Reference) and part.name not in self._regexes:
                        changed |= bool(after & ~follow_of_rule[part.name])
                        follow_of_rule[part.name] |= after
                    else:
                        waiting.extend(self._parts(part, after))
        return shapes, follow

    def _parts(self, part: Expression, after: int) -> Iterator[tuple[Expression, int]]:
        """Split a part that is not a lexeme: yield its parts, each with the characters that can follow it."""
        match part:
            case Reference(name):
                yield self._rules[name], after
            case Repeated(item, _, most):
                yield item, after if most == 1 else after | self._shape(item).first
            case Alternatives(branches):
                for branch in branches:
                    yield branch, after
            case Sequence(items):
                for item in reversed(items):
                    yield item, after
                    shape = self._shape(item)
                    after = shape.first | (after if shape.nullable else 0)


def _one_after_the_other(one: _Shape, other: _Shape) -> _Shape:
    after = other.after | (one.after | other.first if other.nullable else 0)
    if one.after & other.first:
        after = _ALL
    return _Shape(one.nullable and other.nullable, one.first | (other.first if one.nullable else 0), after)


def _one_or_the_other(one: _Shape, other: _Shape) -> _Shape:
    after = _ALL if one.first & other.first else one.after | other.after
    # If one branch matches the empty text, the characters that start the other branch can extend this match.
    after |= (other.first if one.nullable else 0) | (one.first if other.nullable else 0)
    return _Shape(one.nullable or other.nullable, one.first | other.first, after)


def _char_sets(expression: Expression) -> Iterator[CharSet]:
    waiting = [expression]
    while waiting:
        match waiting.pop():
            case Chars(chars):
                yield chars
            case Repeated(item):
                waiting.append(item)
            case Sequence(parts) | Alternatives(parts):
                waiting.extend(parts)
