"""Rewrites grammars to the form with the fastest masks in xgrammar: a part and its continuation are in one rule.

For each position in a rule, the library stores which tokens are allowed. Tokens that extend past the end of the rule
must be tried again for each mask, and the library treats groups and repetitions as rules. Therefore a part and its
continuation are written as one path, which is a sequence of parts. A repetition within a path becomes a reference to a
new rule: `x ("," x)*` becomes `x more` with `more ::= "," x more | ""`. References to small rules are replaced by the
rules' expressions.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final, TypeAlias

from graftlm_grammar.ebnf import EMPTY, Alternatives, Chars, Expression, Reference, Repeated, Sequence, references

__all__ = ["right_linear"]

#: Maximum total number of parts after inlining a rule at all its references.
_MAX_INLINED: Final = 2000
#: Maximum like `_MAX_INLINED`, for a rule that matches the empty text.
_MAX_EMPTY_INLINED: Final = 32
#: Maximum number of parts of an unrolled repetition.
_MAX_UNROLLED: Final = 128
#: Maximum like `_MAX_UNROLLED`, for repetitions within an inlined rule of a grammar with more than `_FEW_RULES` rules.
_MAX_UNROLLED_WITHIN: Final = 8
_FEW_RULES: Final = 200
#: Maximum nesting of expressions, including inlined rules.
_MAX_DEPTH: Final = 80

_Path: TypeAlias = tuple[Expression, ...]


def right_linear(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return right-linear rules that accept the same texts. Some rules keep their names.

    Args:
        rules: name -> expression; every referenced rule is among them.
    """
    return _Writer(rules).write()


class _Writer:
    """Writes each rule as alternatives of paths."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = rules
        below = {name: tuple(references(expression)) for name, expression in rules.items()}
        order, recursive = _leaves_first(below)
        self._empty = _empty_rules(rules, order)
        self._small = _small_rules(rules, below, order, recursive, self._empty)  # name -> size
        self._depth = 0
        self._within = 0
        self._written: dict[str, Expression] = {}
        self._prefix = "n"
        while any(name.startswith(self._prefix) for name in rules):
            self._prefix += "n"

    def write(self) -> dict[str, Expression]:
        """Return the rewritten rules that are reachable from `root`."""
        waiting = ["root"]
        while waiting:
            name = waiting.pop()
            if name not in self._written:
                num_before = len(self._written)
                self._written[name] = EMPTY
                self._written[name] = _either(self._paths(self._rules[name], ()))
                new = list(self._written)[num_before:]
                waiting += [other for rule in new for other in references(self._written[rule])]
        return self._written

    def _paths(self, expression: Expression, after: _Path) -> list[_Path]:
        """Return the paths through an expression and its continuation `after`."""
        self._depth += 1
        try:
            match expression:
                case Sequence(items):
                    return self._sequence(items, after)
                case Alternatives(branches):
                    after = self._named(after)
                    return [path for branch in branches for path in self._paths(branch, after)]
                case Repeated(item, least, most):
                    return self._repeated(item, least, most, after)
                case Reference(name) if name in self._small and self._depth < _MAX_DEPTH:
                    return self._inlined(name, after)
            return [(expression, *after)]
        finally:
            self._depth -= 1

    def _sequence(self, items: tuple[Expression, ...], after: _Path) -> list[_Path]:
        paths, plain = [after], list[Expression]()
        for item in reversed(items):
            if isinstance(item, Chars):
                plain.append(item)
                continue
            paths = self._paths(item, (*reversed(plain), *self._one(paths)))
            plain.clear()
        return [(*reversed(plain), *self._one(paths))] if plain else paths

    def _inlined(self, name: str, after: _Path) -> list[_Path]:
        self._within += 1
        paths = self._paths(self._rules[name], after)
        self._within -= 1
        return paths

    def _repeated(self, item: Expression, least: int, most: int | None, after: _Path) -> list[_Path]:
        is_narrow = self._within and len(self._written) > _FEW_RULES
        limit = _MAX_UNROLLED_WITHIN if is_narrow else _MAX_UNROLLED
        if _is_empty(item, self._empty) or (most or least) * _size(item, self._small) > limit:
            return [(Repeated(item, least, most), *after)]
        if most is None and isinstance(item, Chars):
            return [(*[item] * least, Repeated(item, 0, None), *after)]
        after = self._named(after)
        if most is None:
            again = self._new_rule()
            self._written[again.name] = _either([*self._paths(item, (again,)), after])
            paths: list[_Path] = [(again,)]
        else:
            paths = [after]
            for _ in range(most - least):
                paths = [*self._paths(item, self._one(paths)), after]
        for _ in range(least):
            paths = self._paths(item, self._one(paths))
        return paths

    def _one(self, paths: list[_Path]) -> _Path:
        """Return one path that is equivalent to several: a reference to a new rule, unless there is only one path."""
        if len(paths) == 1:
            return paths[0]
        rule = self._new_rule()
        self._written[rule.name] = _either(paths)
        return (rule,)

    def _named(self, path: _Path) -> _Path:
        """Return an equivalent path of at most one part, which can be repeated. A longer path becomes a new rule."""
        if len(path) < 2:
            return path
        rule = self._new_rule()
        self._written[rule.name] = _either([path])
        return (rule,)

    def _new_rule(self) -> Reference:
        name = f"{self._prefix}{len(self._written)}"
        self._written[name] = EMPTY
        return Reference(name)


def _either(paths: list[_Path]) -> Expression:
    branches = [path[0] if len(path) == 1 else Sequence(path) for path in paths]
    return branches[0] if len(branches) == 1 else Alternatives(tuple(branches))


def _empty_rules(rules: Mapping[str, Expression], leaves_first: list[str]) -> set[str]:
    """Return the rules that match the empty text."""
    empty: set[str] = set()
    found = True
    while found:
        found = False
        for name in leaves_first:
            if name not in empty and _is_empty(rules[name], empty):
                empty.add(name)
                found = True
    return empty


def _is_empty(expression: Expression, rules: set[str]) -> bool:
    """Return whether an expression matches the empty text; `rules` are the names of all rules that match it."""
    match expression:
        case Reference(name):
            return name in rules
        case Sequence(items):
            return all(_is_empty(item, rules) for item in items)
        case Alternatives(branches):
            return any(_is_empty(branch, rules) for branch in branches)
        case Repeated(item, least):
            return least == 0 or _is_empty(item, rules)
    return False


def _small_rules(
    rules: Mapping[str, Expression],
    below: Mapping[str, tuple[str, ...]],
    leaves_first: list[str],
    recursive: set[str],
    empty: set[str],
) -> dict[str, int]:
    """Return the rules to inline at all their references, with their sizes. None of them is recursive.

    The limit is lower for rules that match the empty text: inlining them often makes the grammar ambiguous.
    """
    sizes: dict[str, int] = {}
    for name in leaves_first:
        sizes[name] = 1 if name in recursive else _size(rules[name], sizes)
    uses = Counter({"root": 1})
    small: dict[str, int] = {}
    for name in reversed(leaves_first):
        limit = _MAX_EMPTY_INLINED if name in empty else _MAX_INLINED
        if name != "root" and name not in recursive and uses[name] * sizes[name] <= limit:
            small[name] = sizes[name]
        for other in below[name]:
            uses[other] += uses[name] if name in small else 1
    return small


def _leaves_first(below: Mapping[str, tuple[str, ...]]) -> tuple[list[str], set[str]]:
    """Return the rules reachable from `root`, each after the rules that it refers to, and the recursive rules.

    The recursive rules include at least one rule of each cycle: the rule at which the search entered the cycle.

    Args:
        below: name -> the rules that it refers to.
    """
    order: list[str] = []
    recursive: set[str] = set()
    entered, left = {"root"}, set[str]()
    path = [("root", iter(below["root"]))]
    while path:
        name, others = path[-1]
        for other in others:
            if other not in entered:
                entered.add(other)
                path.append((other, iter(below[other])))
                break
            if other not in left:
                recursive.add(other)
        else:
            path.pop()
            left.add(name)
            order.append(name)
    return order, recursive


def _size(expression: Expression, sizes: Mapping[str, int]) -> int:
    """Return the number of parts of an expression, including those of the rules in `sizes`."""
    match expression:
        case Reference(name):
            return sizes.get(name, 1)
        case Sequence(parts) | Alternatives(parts):
            return sum(_size(part, sizes) for part in parts)
        case Repeated(item, least, most):
            return _size(item, sizes) * max(1, most or least)
    return 1
