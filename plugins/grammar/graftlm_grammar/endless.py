"""Finds the rules of a grammar that no finite text matches."""

from collections.abc import Mapping

from graftlm_grammar.ebnf import Alternatives, Expression, Reference, Repeated, Sequence

__all__ = ["endless_rules", "reachable_rules"]


def endless_rules(rules: Mapping[str, Expression]) -> tuple[str, ...]:
    """Return the rules reachable from `root` that no finite text matches, such as `a ::= "x" a`.

    An output that enters such a rule could not end.

    Args:
        rules: name -> expression, as from `read_ebnf`.
    """
    finite: set[str] = set()
    found = True
    while found:
        found = False
        for name, expression in rules.items():
            if name not in finite and _is_finite(expression, finite):
                finite.add(name)
                found = True
    return tuple(name for name in reachable_rules(rules) if name not in finite)


def _is_finite(expression: Expression, finite: set[str]) -> bool:
    """Return whether a finite text matches an expression; `finite` is the set of rules that finite texts match."""
    match expression:
        case Reference(name):
            return name in finite
        case Sequence(items):
            return all(_is_finite(item, finite) for item in items)
        case Alternatives(branches):
            return any(_is_finite(branch, finite) for branch in branches)
        case Repeated(item, least):
            return least == 0 or _is_finite(item, finite)
    return True


def reachable_rules(rules: Mapping[str, Expression]) -> list[str]:
    """Return the names of the rules reachable from `root`, `root` first."""
    names, waiting = ["root"], [rules["root"]]
    while waiting:
        match waiting.pop():
            case Reference(name) if name not in names:
                names.append(name)
                waiting.append(rules[name])
            case Sequence(parts) | Alternatives(parts):
                waiting.extend(parts)
            case Repeated(item):
                waiting.append(item)
    return names
