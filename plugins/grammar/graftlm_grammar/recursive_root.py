"""Rewrites grammars whose rules refer to the root rule, so that xgrammar's masks are correct.

xgrammar 0.2.8 assumes that no text follows the root rule. In `root ::= "[" root* "]" | "x"`, masks forbid every token
that contains the end of an inner `root` and the text after it, such as `x]` and `]]`, although `accept`
accepts such tokens.
"""

from collections.abc import Mapping

from graftlm_grammar.ebnf import Alternatives, Expression, Reference, Repeated, Sequence, references

__all__ = ["with_separate_root"]

_ROOT = "root"


def with_separate_root(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return rules that accept the same texts, in which no rule references `root`.

    Args:
        rules: name -> expression; every referenced rule is among them.
    """
    if not any(_ROOT in references(expression) for expression in rules.values()):
        return dict(rules)
    inner = _ROOT
    while inner in rules:
        inner += "_"
    renamed = {inner if name == _ROOT else name: _renamed(expression, inner) for name, expression in rules.items()}
    return {_ROOT: Reference(inner), **renamed}


def _renamed(expression: Expression, inner: str) -> Expression:
    """Return an expression with `inner` in place of each reference to the root rule."""
    match expression:
        case Reference(name) if name == _ROOT:
            return Reference(inner)
        case Sequence(items):
            return Sequence(tuple(_renamed(item, inner) for item in items))
        case Alternatives(branches):
            return Alternatives(tuple(_renamed(branch, inner) for branch in branches))
        case Repeated(item, least, most):
            return Repeated(_renamed(item, inner), least, most)
    return expression
