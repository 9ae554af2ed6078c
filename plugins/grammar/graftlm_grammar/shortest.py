"""How long the shortest text of a grammar is."""

from collections.abc import Mapping
from math import inf

from graftlm.errors import GrammarError
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence

__all__ = ["check_shortest"]

#: Characters. What a grammar forces is part of its every text, so this bounds what has to be walked at once.
_MAX_SHORTEST = 16_384


def check_shortest(rules: Mapping[str, Expression], kind: str) -> None:
    """Refuse a grammar whose every text is very long, such as thousands repeated thousands of times.

    Raises:
        GrammarError: naming the rule, where it is not the first.
    """
    lengths = dict.fromkeys(rules, inf)
    order, changed = list(rules), True
    while changed:
        changed = False
        for name in order:
            length = _length(rules[name], lengths)
            if length < lengths[name]:
                lengths[name], changed = length, True
        order.reverse()  # chains of rules are followed in either direction at once
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
