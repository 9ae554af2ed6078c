"""Expressions written as EBNF."""

from collections.abc import Mapping
from itertools import groupby
from typing import Final

from graftlm_grammar.char_set import ebnf_class
from graftlm_grammar.choice import quoted_text
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence

__all__ = ["ebnf_text"]

_QUANTIFIERS: Final = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def ebnf_text(rules: Mapping[str, Expression]) -> str:
    """Return the grammar of some rules, a line each.

    Sets of characters are written as what they hold: a library that reads `[^a]` itself may take halves of surrogate
    pairs for characters, which no text holds.
    """
    return "\n".join(f"{name} ::= {_text(expression)}" for name, expression in rules.items())


def _text(expression: Expression) -> str:
    match expression:
        case Chars(chars):
            return ebnf_class(chars)
        case Reference(name):
            return name
        case Repeated(item, least, most):
            bounds = f"{{{least},{'' if most is None else most}}}"
            return _grouped(item) + _QUANTIFIERS.get((least, most), bounds)
        case Alternatives(branches):
            return " | ".join(map(_text, branches))
        case Sequence(items):
            runs = groupby(items, key=_is_one_char)
            return " ".join(part for is_literal, run in runs for part in _parts(list(run), is_literal)) or '""'


def _parts(run: list[Expression], is_literal: bool) -> list[str]:
    if not is_literal:
        return [_grouped(item) for item in run]
    return [quoted_text("".join(chr(item.chars[0][0]) for item in run if isinstance(item, Chars)))]


def _is_one_char(expression: Expression) -> bool:
    return isinstance(expression, Chars) and len(expression.chars) == 1 and len(set(expression.chars[0])) == 1


def _grouped(expression: Expression) -> str:
    text = _text(expression)
    return f"({text})" if isinstance(expression, Alternatives | Sequence | Repeated) else text
