"""Generates EBNF grammars, with a recogniser that is independent of the grammar backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

__all__ = ["EbnfGrammar", "generate_ebnfs"]


@dataclass(frozen=True, slots=True)
class _Text:
    text: str


@dataclass(frozen=True, slots=True)
class _Class:
    ranges: tuple[tuple[str, str], ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: "tuple[_Expression, ...]"


@dataclass(frozen=True, slots=True)
class _Either:
    branches: "tuple[_Expression, ...]"


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: "_Expression"
    least: int
    most: int | None


_Expression: TypeAlias = _Text | _Class | _Rule | _Sequence | _Either | _Repeat


@dataclass(frozen=True, slots=True)
class EbnfGrammar:
    """A grammar: rule name -> rule, including `root`. No rule is left-recursive."""

    rules: dict[str, _Expression]

    @property
    def text(self) -> str:
        """The grammar as text, one line per rule."""
        return "\n".join(f"{name} ::= {_written(expression)}" for name, expression in self.rules.items())

    def matches(self, text: str) -> bool:
        """Return whether the grammar matches a whole text."""
        recogniser = _Recogniser(self.rules, text)
        for start in reversed(range(len(text) + 1)):  # earlier positions use results of later ones
            for name in reversed(self.rules):
                recogniser.ends(_Rule(name), start)
        return len(text) in recogniser.ends(_Rule("root"), 0)


def generate_ebnfs(num: int, seed: int = 0) -> list[EbnfGrammar]:
    """Return random grammars with classes, counted repetitions up to 300, and recursion.

    Args:
        num: number of grammars.
        seed: seed of the random numbers; equal seeds give equal grammars.
    """
    return [_draw(Random(f"ebnf {seed} {i}")) for i in range(num)]


class _Recogniser:
    """A recogniser that finds the positions at which expressions can end in a text. Results of rules are cached."""

    def __init__(self, rules: Mapping[str, _Expression], text: str) -> None:
        self._rules = rules
        self._text = text
        self._found: dict[tuple[str, int], frozenset[int]] = {}

    def ends(self, expression: _Expression, start: int) -> frozenset[int]:
        match expression:
            case _Text(text):
                return frozenset({start + len(text)} if self._text.startswith(text, start) else ())
            case _Class(ranges, negated):
                char = self._text[start : start + 1]
                is_in = any(first <= char <= last for first, last in ranges)
                return frozenset({start + 1} if char and is_in != negated else ())
            case _Rule(name):
                if (name, start) not in self._found:
                    self._found[name, start] = self.ends(self._rules[name], start)
                return self._found[name, start]
            case _Sequence(items):
                places = frozenset({start})
                for item in items:
                    places = frozenset(end for place in places for end in self.ends(item, place))
                return places
            case _Either(branches):
                return frozenset(end for branch in branches for end in self.ends(branch, start))
            case _Repeat(item, least, most):
                return self._repeated(item, least, most, start)

    def _repeated(self, item: _Expression, least: int, most: int | None, start: int) -> frozenset[int]:
        places, found, num = frozenset({start}), set[int](), 0
        while places:
            if num >= least:
                # Without a maximum, known positions need no further repetition.
                places = places if most is not None else places - found
                found |= places
            if num == most:
                break
            places = frozenset(end for place in places for end in self.ends(item, place))
            num += 1
        return frozenset(found)


def _written(expression: _Expression) -> str:
    match expression:
        case _Text(text):
            return f'"{"".join(map(_escaped, text))}"'
        case _Class(ranges, negated):
            parts = [_escaped(first) + (f"-{_escaped(last)}" if last > first else "") for first, last in ranges]
            return f"[{'^' * negated}{''.join(parts)}]"
        case _Rule(name):
            return name
        case _Sequence(items):
            return " ".join(map(_grouped, items))
        case _Either(branches):
            return " | ".join(map(_written, branches))
        case _Repeat(item, least, most):
            short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            if least == most:
                short = f"{{{least}}}"
            counts = f"{{{least},{'' if most is None else most}}}"
            return _grouped(item) + (short or counts)


def _grouped(expression: _Expression) -> str:
    text = _written(expression)
    return f"({text})" if isinstance(expression, _Sequence | _Either | _Repeat) else text


def _escaped(char: str) -> str:
    if char in '"\\[]^-':
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}"


_TEXTS: Final = ("a", "ab", "if ", "(", ")", ", ", '"', "\\", "\n", "é", "数字", "🙂", "</t>", "true", '":"', "0x")
_CLASSES: Final = (
    _Class((("a", "z"),)),
    _Class((("0", "9"),)),
    _Class((("a", "f"), ("0", "9"))),
    _Class((("a", "z"), ("é", "é"))),
    _Class((("à", "ö"),)),
    _Class((("一", "鿿"), ("가", "힣"))),
    _Class((("🙂", "🙏"), (" ", "~"))),
    _Class((("a", "a"), ("e", "e")), negated=True),
    _Class((("\n", "\n"),), negated=True),
    _Class((('"', '"'), ("\\", "\\"), ("\x00", "\x1f")), negated=True),
    _Class((("a", "z"), ("À", "ÿ"), ("一", "鿿")), negated=True),
    _Class((("]", "]"), ("-", "-"), ("^", "^"))),
)
_COUNTS: Final = ((0, None), (1, None), (0, 1), (2, 2), (0, 3), (1, 4), (3, 7), (2, None), (12, 12))
_LARGE_COUNTS: Final = ((129, 129), (10, 200), (0, 150), (130, None), (100, 300), (128, 128), (150, 290))
_DEPTH: Final = 3


def _draw(random: Random) -> EbnfGrammar:
    names = ["root", *(f"r{i}" for i in range(random.randint(0, 4)))]
    rules: dict[str, _Expression] = {}
    for i, name in enumerate(names):
        rules[name] = _expression(random, names[i + 1 :], _DEPTH)
    if random.random() < 0.4:  # nested lists or brackets
        name = random.choice(names)
        left, right = random.choice((("(", ")"), ("[", "]"), ("<é>", "</é>")))
        within = _Repeat(_Rule(name), 0, random.choice((1, 2, None)))
        rules[name] = _Either((_Sequence((_Text(left), within, _Text(right))), _solid(rules[name])))
    if random.random() < 0.3:  # right recursion
        name = random.choice(names)
        rules[name] = _Either((_Sequence((_Text(random.choice(_TEXTS)), _Rule(name))), _solid(rules[name])))
    return EbnfGrammar(rules)


def _solid(expression: _Expression) -> _Expression:
    """Return an expression after a prefix: it never matches the empty text, so each repetition makes progress."""
    return _Sequence((_Text("x"), expression))


def _expression(random: Random, later: list[str], depth: int) -> _Expression:
    kind = random.random()
    if depth == 0 or kind < 0.2:
        return _leaf(random, later)
    if kind < 0.5:
        return _Sequence(tuple(_expression(random, later, depth - 1) for _ in range(random.randint(2, 3))))
    if kind < 0.75:
        return _Either(tuple(_expression(random, later, depth - 1) for _ in range(random.randint(2, 3))))
    if random.random() < 0.25:
        return _Repeat(random.choice(_CLASSES), *random.choice(_LARGE_COUNTS))
    return _Repeat(_leaf(random, []), *random.choice(_COUNTS))


def _leaf(random: Random, later: list[str]) -> _Expression:
    if later and random.random() < 0.4:
        return _Rule(random.choice(later))
    return random.choice(_CLASSES) if random.random() < 0.5 else _Text(random.choice(_TEXTS))
