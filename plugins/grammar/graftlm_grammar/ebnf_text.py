"""Expressions written as EBNF."""

from collections.abc import Mapping
from itertools import groupby
from typing import Final

from graftlm_grammar.char_set import complement, ebnf_class, union
from graftlm_grammar.choice import quoted_text
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence
from graftlm_grammar.large_counts import MAX_PLAIN_COUNT, is_nearly_all

__all__ = ["ebnf_text"]

_SURROGATES: Final = ((0xD800, 0xDFFF),)
_QUANTIFIERS: Final = {(0, None): "*", (1, None): "+", (0, 1): "?"}


def ebnf_text(rules: Mapping[str, Expression], leave_out: bool = False) -> str:
    """Return the grammar of some rules, a line each.

    Sets of characters are written as what they hold: a library that reads `[^a]` itself may take halves of surrogate
    pairs for characters, which no text holds.

    Args:
        leave_out: write nearly all characters, repeated more often than `large_counts.MAX_PLAIN_COUNT`, as those that
            are left out, halves of surrogate pairs included. xgrammar alone reads the result.
    """
    return "\n".join(f"{name} ::= {_text(expression, leave_out)}" for name, expression in rules.items())


def _text(expression: Expression, leave_out: bool) -> str:
    match expression:
        case Chars(chars):
            return ebnf_class(chars)
        case Reference(name):
            return name
        case Repeated(item, least, most):
            bounds = f"{{{least},{'' if most is None else most}}}"
            is_large = max(least, most or 0) > MAX_PLAIN_COUNT
            if leave_out and is_large and isinstance(item, Chars) and is_nearly_all(item.chars):
                return f"[^{ebnf_class(union(complement(item.chars), _SURROGATES))[1:]}{bounds}"
            return _grouped(item, leave_out) + _QUANTIFIERS.get((least, most), bounds)
        case Alternatives(branches):
            return " | ".join([_text(branch, leave_out) for branch in branches])
        case Sequence(items):
            runs = groupby(items, key=_is_one_char)
            return (
                " ".join(part for is_literal, run in runs for part in _parts(list(run), is_literal, leave_out)) or '""'
            )


def _parts(run: list[Expression], is_literal: bool, leave_out: bool) -> list[str]:
    if not is_literal:
        return [_grouped(item, leave_out) for item in run]
    return [quoted_text("".join(chr(item.chars[0][0]) for item in run if isinstance(item, Chars)))]


def _is_one_char(expression: Expression) -> bool:
    return isinstance(expression, Chars) and len(expression.chars) == 1 and len(set(expression.chars[0])) == 1


def _grouped(expression: Expression, leave_out: bool) -> str:
    text = _text(expression, leave_out)
    return f"({text})" if isinstance(expression, Alternatives | Sequence | Repeated) else text
