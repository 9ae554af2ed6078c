"""The parser of EBNF grammars, and the expressions that it returns."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import CharSet, complement, union
from graftlm_grammar.spec_text import count_of

__all__ = [
    "EMPTY",
    "MAX_COUNT",
    "Alternatives",
    "Chars",
    "Expression",
    "Reference",
    "Repeated",
    "Sequence",
    "read_ebnf",
    "references",
]

_MAX_DEPTH: Final = 100
_MAX_REPEATS: Final = 1000
#: The largest count in a JSON schema, and in a grammar that a schema is translated into.
MAX_COUNT: Final = 10_000
_SPACE: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACES: Final = frozenset(" \t\r\n#")
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]*")
_HEAD: Final = re.compile(rf"({_NAME.pattern})[ \t]*::=")
_QUANTIFIER: Final = re.compile(r"[*+?]|\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_QUANTIFIERS: Final = frozenset("*+?{")
_CODE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a", "b": "\b"}


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set that is not empty."""

    chars: CharSet


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to another rule, which matches the rule's expression."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of expressions, matched one after the other."""

    items: "tuple[Expression, ...]"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """A choice of one of several expressions."""

    branches: "tuple[Expression, ...]"


@dataclass(frozen=True, slots=True)
class Repeated:
    """An expression repeated `least` to `most` times; `most` is None if there is no maximum."""

    item: "Expression"
    least: int
    most: int | None


Expression: TypeAlias = Chars | Reference | Sequence | Alternatives | Repeated
EMPTY: Final = Sequence(())


def read_ebnf(text: str, max_repeats: int = _MAX_REPEATS) -> dict[str, Expression]:
    """Return the rules of a grammar by name. The result includes `root` and every rule that is referred to.

    Args:
        text: the grammar.
        max_repeats: the largest count that the grammar may contain.

    Raises:
        GrammarError: the grammar is malformed; the message names the line.
    """
    rules = dict(_Reader(text, max_repeats).rules())
    if "root" not in rules:
        raise GrammarError(f"ebnf: expected a rule named root, got {', '.join(rules)[:80] or 'none'}")
    for name, expression in rules.items():
        for reference in references(expression):
            if reference not in rules:
                raise GrammarError(f'ebnf: rule {name}: Rule "{reference}" is not defined')
    return rules


def references(expression: Expression) -> Iterator[str]:
    """Yield the names of the rules that an expression refers to, once per reference."""
    waiting: list[Expression] = [expression]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Reference):
            yield one.name
        elif isinstance(one, Sequence):
            waiting += [item for item in one.items if not isinstance(item, Chars)]
        elif isinstance(one, Alternatives):
            waiting += one.branches
        elif isinstance(one, Repeated):
            waiting.append(one.item)


@lru_cache(maxsize=1024)
def _one_char(code: int) -> Chars:
    return Chars(((code, code),))


class _Reader:
    """Reads a grammar once, from left to right."""

    def __init__(self, text: str, max_repeats: int) -> None:
        self._text = text
        self._max_repeats = max_repeats
        self._at = 0
        self._seen: set[str] = set()

    def rules(self) -> Iterator[tuple[str, Expression]]:
        self._skip_space()
        while self._at < len(self._text):
            head = _HEAD.match(self._text, self._at)
            if head is None:
                raise self._error("expected a rule, name ::= ...")
            if head.group(1) in self._seen:
                raise self._error(f"rule {head.group(1)} is defined twice")
            self._seen.add(head.group(1))
            self._at = head.end()
            yield head.group(1), self._alternatives(depth=0)

    def _alternatives(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise self._error(f"nested more than {_MAX_DEPTH} groups deep")
        branches = [self._sequence(depth)]
        while self._peek() == "|":
            self._at += 1
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else Alternatives(tuple(branches))

    def _sequence(self, depth: int) -> Expression:
        items: list[Expression] = []
        start = self._at
        self._skip_space()
        while self._peek() not in ("", "|", ")") and not _HEAD.match(self._text, self._at):
            items.append(self._quantified(self._item(depth)))
            self._skip_space()
        if not items:
            self._at = max(start, self._at)
            raise self._error('expected an expression; write "" for the empty text')
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self, depth: int) -> Expression:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self._at += 1
            return Chars(complement(()))
        if char == "(":
            return self._group(depth)
        name = _NAME.match(self._text, self._at)
        if name is None:
            raise self._error(f"unexpected character {char}")
        self._at = name.end()
        if self._peek() == "(":
            raise self._error(f"{name.group()}(...) is not supported; rules have no arguments")
        return Reference(name.group())

    def _group(self, depth: int) -> Expression:
        self._at += 1
        self._skip_space()
        if self._peek() in ("=", "!"):
            raise self._error("lookaheads are not supported")
        inner = self._alternatives(depth + 1)
        self._skip_space()
        if self._peek() != ")":
            raise self._error("a ) is missing")
        self._at += 1
        return inner

    def _quantified(self, item: Expression) -> Expression:
        self._skip_space()
        if self._peek() not in _QUANTIFIERS:
            return item
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            raise self._error("expected {m}, {m,} or {m,n}")
        text, least, comma, most = found.group(), *found.groups()
        if any(count_of(count) > self._max_repeats for count in (least, most) if count):
            raise self._error(f"{text[:80]}: more than {self._max_repeats} repetitions are not supported; use * or +")
        if most and count_of(most) < count_of(least):
            raise self._error(f"{text[:80]}: the maximum is less than the minimum")
        self._at = found.end()
        if least is None:
            return Repeated(item, int(text == "+"), 1 if text == "?" else None)
        at_least = count_of(least)
        return Repeated(item, at_least, count_of(most) if most else None if comma else at_least)

    def _literal(self) -> Expression:
        self._at += 1
        items = []
        while self._peek() != '"':
            items.append(_one_char(self._code('"')))
        self._at += 1
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _class(self) -> Expression:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            first = last = self._code("]")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("", "]"):
                self._at += 1
                last = self._code("]")
            if last < first:
                raise self._error("a range must go from one character to a later one; write \\- for a dash")
            ranges.append((first, last))
        self._at += 1
        chars = complement(union(ranges)) if negated else complement(complement(union(ranges)))
        if not chars:
            raise self._error("the character class is empty")
        return Chars(chars)

    def _code(self, end: str) -> int:
        """Read one character of a literal or a class, and return its code point."""
        char = self._peek()
        if char in ("", "\n"):
            raise self._error(f"a {end} is missing")
        found = _CODE.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
            code = int(next(filter(None, found.groups())), 16)
        elif char == "\\":
            escaped = self._text[self._at + 1 : self._at + 2]
            if escaped == "" or (escaped.isalnum() and escaped not in _CONTROLS):
                raise self._error(f"unknown escape \\{escaped}")
            self._at += 2
            code = ord(_CONTROLS.get(escaped, escaped))
        else:
            self._at += 1
            code = ord(char)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self._error(f"U+{code:04X} is not a character")
        return code

    def _skip_space(self) -> None:
        if self._peek() in _SPACES:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _error(self, message: str) -> GrammarError:
        line = self._text.count("\n", 0, self._at) + 1
        return GrammarError(f"ebnf: line {line}: {message}")
