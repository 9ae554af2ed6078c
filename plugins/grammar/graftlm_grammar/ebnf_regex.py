"""Translates EBNF expressions, ECMAScript regular expressions and plain texts to Rust regular expressions."""

from collections.abc import Mapping
from typing import Final

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import CharSet, complement
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence, read_ebnf
from graftlm_grammar.regex import regex_to_ebnf

__all__ = ["quantifier", "regex_of", "regex_text", "rust_regex"]

_MAX_LEN: Final = 1 << 20
_ANY: Final = complement(())


def regex_of(expression: Expression, rules: Mapping[str, str]) -> str:
    """Translate an EBNF expression.

    Args:
        expression: the expression.
        rules: the translations of the rules that it refers to, by name.

    Raises:
        GrammarError: the result is too long.
    """
    written = _written(expression, rules)
    if len(written) > _MAX_LEN:
        raise GrammarError("the expanded rules are too long; use shorter rules")
    return written


def regex_text(text: str) -> str:
    """Return a regular expression that matches only the given text."""
    return "".join(_char(ord(char)) for char in text)


def rust_regex(regex: str, alphabet: CharSet = _ANY, search: bool = False) -> str:
    """Translate an ECMAScript regular expression. Arguments and errors are the same as for `regex_to_ebnf`."""
    return regex_of(read_ebnf(f"root ::= {regex_to_ebnf(regex, alphabet, search)}")["root"], {})


def _written(expression: Expression, rules: Mapping[str, str]) -> str:
    match expression:
        case Chars(chars):
            return _class(chars)
        case Reference(name):
            return f"(?:{rules[name]})"
        case Sequence(items):
            return "".join([regex_of(item, rules) for item in items])
        case Alternatives(branches):
            return f"(?:{'|'.join([regex_of(branch, rules) for branch in branches])})"
        case Repeated(item, least, most):
            return f"(?:{regex_of(item, rules)}){quantifier(least, most)}"


def quantifier(least: int, most: int | None) -> str:
    """Return the quantifier of a repetition, such as `*` or `{2,5}`."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"


def _class(chars: CharSet) -> str:
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return _char(chars[0][0])
    return f"[{''.join(_char(first) + (f'-{_char(last)}' if last > first else '') for first, last in chars)}]"


def _char(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"
