"""Writes expressions as EBNF."""

from collections.abc import Mapping
from itertools import groupby
from typing import Final

from graftlm_grammar.char_set import complement, ebnf_class, union
from graftlm_grammar.choice import quoted_text
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence
from graftlm_grammar.large_counts import MAX_PLAIN_COUNT, SoundRules, is_nearly_all

__all__ = ["ebnf_text", "library_text"]

_SURROGATES: Final = ((0xD800, 0xDFFF),)
_QUANTIFIERS: Final = {(0, None): "*", (1, None): "+", (0, 1): "?"}
_ANY_CHAR: Final = ebnf_class(complement(()))


def ebnf_text(rules: Mapping[str, Expression]) -> str:
    """Return rules as a grammar, one line per rule.

    Sets of characters are written without negation, because a library may include surrogates in `[^a]`. No text
    contains surrogates.
    """
    writer = _Writer()
    return "\n".join(f"{name} ::= {writer.text(expression)}" for name, expression in rules.items())


def library_text(sound: SoundRules) -> str:
    """Return rules as a grammar for xgrammar, in the form for which its masks are correct; see large_counts.py."""
    writer = _LibraryWriter()
    lines = []
    for name, expression in sound.rules.items():
        lookahead = f" (={_ANY_CHAR})" if name in sound.followed else ""
        lines.append(f"{name} ::= {writer.text(expression)}{lookahead}")
    return "\n".join(lines)


class _Writer:
    def text(self, expression: Expression) -> str:
        match expression:
            case Chars(chars):
                return ebnf_class(chars)
            case Reference(name):
                return name
            case Repeated(item, least, most):
                return self.repeated(item, least, most)
            case Alternatives(branches):
                return " | ".join(map(self.text, branches))
            case Sequence(items):
                runs = groupby(items, key=_is_one_char)
                return " ".join(part for is_literal, run in runs for part in self._parts(list(run), is_literal)) or '""'

    def repeated(self, item: Expression, least: int, most: int | None) -> str:
        bounds = f"{{{least},{'' if most is None else most}}}"
        return self._grouped(item) + _QUANTIFIERS.get((least, most), bounds)

    def _parts(self, run: list[Expression], is_literal: bool) -> list[str]:
        if not is_literal:
            return [self._grouped(item) for item in run]
        return [quoted_text("".join(chr(item.chars[0][0]) for item in run if isinstance(item, Chars)))]

    def _grouped(self, expression: Expression) -> str:
        text = self.text(expression)
        return f"({text})" if isinstance(expression, Alternatives | Sequence | Repeated) else text


class _LibraryWriter(_Writer):
    """Writes a class of nearly all characters, repeated more than 128 times, as a negated class.

    The negated class also excludes surrogates.
    """

    def repeated(self, item: Expression, least: int, most: int | None) -> str:
        is_large = max(least, most or 0) > MAX_PLAIN_COUNT
        if not (is_large and isinstance(item, Chars) and is_nearly_all(item.chars)):
            return super().repeated(item, least, most)
        excluded = ebnf_class(union(complement(item.chars), _SURROGATES))
        return f"[^{excluded[1:]}{{{least},{'' if most is None else most}}}"


def _is_one_char(expression: Expression) -> bool:
    return isinstance(expression, Chars) and len(expression.chars) == 1 and len(set(expression.chars[0])) == 1
