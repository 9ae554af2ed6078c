"""Checks the length of the shortest text of a grammar."""

from collections.abc import Mapping
from math import inf

from graftlm.errors import GrammarError
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence

__all__ = ["check_shortest"]

#: Maximum length of the shortest text, in characters. This limits the length of forced text, which every output
#: contains.
_MAX_SHORTEST = 16_384


def check_shortest(rules: Mapping[str, Expression], kind: str) -> None:
    """Refuse a grammar whose shortest text is very long, such as a thousand repetitions of a thousand repetitions.

    Raises:
        GrammarError: the shortest text of a rule is too long; the message names the rule, unless it is `root`.
    """
    lengths = dict.fromkeys(rules, inf)
    order, changed = list(rules), True
    while changed:
        changed = False
        for name in order:
            length = _length(rules[name], lengths)
            if length < lengths[name]:
                lengths[name], changed = length, True
        order.reverse()  # alternate directions, so that chains of rules in either order need few passes
    for name, length in lengths.items():
        if _MAX_SHORTEST < length < inf:
            raise GrammarError(
                f"{kind}: its shortest text has more than {_MAX_SHORTEST} characters"
                f"{'' if name == 'root' or kind != 'ebnf' else f' (rule {name})'}; repeat less"
            )


def _length(expression: Expression, lengths: Mapping[str, float]) -> float:
    match expression:
        case Chars():
            return 1
        case Reference(name):
            return lengths[name]
        case Sequence(items):
            return sum(_length(item, lengths) for item in items)
        case Alternatives(branches):
            return min(_length(branch, lengths) for branch in branches)
        case Repeated(item, least):
            return least * _length(item, lengths) if least else 0
