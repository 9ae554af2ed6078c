"""Translates EBNF grammars to Lark grammars for llguidance."""

from collections.abc import Iterator, Mapping
from typing import Final

from graftlm.errors import GrammarError
from graftlm_grammar.ebnf import (
    EMPTY,
    Alternatives,
    Chars,
    Expression,
    Reference,
    Repeated,
    Sequence,
    read_ebnf,
    references,
)
from graftlm_grammar.ebnf_lexemes import Lexemes
from graftlm_grammar.ebnf_regex import quantifier, regex_of
from graftlm_grammar.shortest import check_shortest

__all__ = ["ebnf_to_lark"]

_MAX_PARTS: Final = 20_000


def ebnf_to_lark(text: str) -> str:
    """Return a Lark grammar of the same language; its first rule is `start`.

    A grammar without recursion becomes one regular expression; other grammars are divided into lexemes.

    Raises:
        GrammarError: the grammar is malformed or too large, no text matches it, or its shortest text is too long.
    """
    rules = _reachable(_productive(read_ebnf(text)))
    regexes = _regular(rules)
    check_shortest(rules, "ebnf")
    if "root" in regexes:
        return f"start: /{regexes['root']}/"
    if sum(1 for rule in rules.values() for _ in _parts(rule)) > _MAX_PARTS:
        raise GrammarError(f"ebnf: a recursive grammar may have at most {_MAX_PARTS} parts")
    return _Writer(rules, Lexemes(rules, regexes)).text()


class _Writer:
    """Writes the rules and the lexemes that they use."""

    def __init__(self, rules: Mapping[str, Expression], lexemes: Lexemes) -> None:
        self._rules = rules
        self._lexemes = lexemes
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []
        self._terminals: dict[str, str] = {}

    def text(self) -> str:
        lines = [f"start: {self._name('root')}"]
        while self._waiting:
            name = self._waiting.pop()
            lines.append(f"{self._names[name]}: {self._written(self._rules[name])}")
        return "\n".join([*lines, *(f"{name}: /{regex}/" for regex, name in self._terminals.items())])

    def _name(self, rule: str) -> str:
        if rule not in self._names:
            self._names[rule] = f"r{len(self._names)}"
            self._waiting.append(rule)
        return self._names[rule]

    def _written(self, expression: Expression) -> str:
        regex = self._lexemes.regex(expression)
        if regex is not None:
            return self._terminals.setdefault(regex, f"T{len(self._terminals)}")
        match expression:
            case Reference(name):
                return self._name(name)
            case Alternatives(branches):
                return f"({' | '.join(map(self._written, branches))})"
            case Repeated(item, least, most):
                return f"({self._written(item)}){quantifier(least, most)}"
            case Sequence(items):
                return " ".join(map(self._written, items)) or '""'
            case Chars():
                raise AssertionError("a character is a lexeme")


def _productive(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return the rules without the branches that no finite text matches.

    Raises:
        GrammarError: no finite text matches `root`.
    """
    ending: set[str] = set()
    num_before = -1
    while num_before < len(ending):
        num_before = len(ending)
        ending |= {name for name, rule in rules.items() if _ends(rule, ending)}
    if "root" not in ending:
        raise GrammarError("ebnf: no finite text matches root")
    return {name: _without_endless(rules[name], ending) for name in rules if name in ending}


def _ends(expression: Expression, ending: set[str]) -> bool:
    match expression:
        case Chars():
            return True
        case Reference(name):
            return name in ending
        case Repeated(item, least):
            return least == 0 or _ends(item, ending)
        case Sequence(items):
            return all(_ends(item, ending) for item in items)
        case Alternatives(branches):
            return any(_ends(branch, ending) for branch in branches)


def _without_endless(expression: Expression, ending: set[str]) -> Expression:
    match expression:
        case Repeated(item, least, most):
            return Repeated(_without_endless(item, ending), least, most) if _ends(item, ending) else EMPTY
        case Sequence(items):
            return Sequence(tuple(_without_endless(item, ending) for item in items))
        case Alternatives(branches):
            return Alternatives(tuple(_without_endless(one, ending) for one in branches if _ends(one, ending)))
    return expression


def _reachable(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    found, waiting = {}, ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = rules[name]
            waiting.extend(references(rules[name]))
    return found


def _regular(rules: Mapping[str, Expression]) -> dict[str, str]:
    """Return the rules that do not refer to a recursive rule, directly or indirectly, as regular expressions."""
    regexes: dict[str, str] = {}
    users: dict[str, list[str]] = {name: [] for name in rules}
    num_open = {}
    for name, rule in rules.items():
        named = set(references(rule))
        num_open[name] = len(named)
        for reference in named:
            users[reference].append(name)
    waiting = [name for name, num in num_open.items() if num == 0]
    while waiting:
        name = waiting.pop()
        try:
            regexes[name] = regex_of(rules[name], regexes)
        except GrammarError as error:
            raise GrammarError(f"ebnf: rule {name}: {error}") from None
        for user in users[name]:
            num_open[user] -= 1
            if num_open[user] == 0:
                waiting.append(user)
    return regexes


def _parts(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all expressions within it."""
    waiting = [expression]
    while waiting:
        part = waiting.pop()
        yield part
        match part:
            case Repeated(item):
                waiting.append(item)
            case Sequence(parts) | Alternatives(parts):
                waiting.extend(parts)
