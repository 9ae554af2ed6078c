"""Regular expressions in Rust's dialect, which are expressions of EBNF, ECMAScript's, or plain texts."""

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
    """Write an expression.

    Args:
        rules: what it refers to, written before.

    Raises:
        GrammarError: what comes out is too long.
    """
    written = _written(expression, rules)
    if len(written) > _MAX_LEN:
        raise GrammarError("the rules, put into each other, are too long; write shorter ones")
    return written


def regex_text(text: str) -> str:
    """Write an expression that a text alone matches."""
    return "".join(_char(ord(char)) for char in text)


def rust_regex(regex: str, alphabet: CharSet = _ANY, search: bool = False) -> str:
    """Translate an ECMAScript expression. Arguments and errors are those of `regex_to_ebnf`."""
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
    """Write how often something comes."""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return short or f"{{{least},{'' if most is None else most}}}"


def _class(chars: CharSet) -> str:
    if len(chars) == 1 and chars[0][0] == chars[0][1]:
        return _char(chars[0][0])
    return f"[{''.join(_char(first) + (f'-{_char(last)}' if last > first else '') for first, last in chars)}]"


def _char(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"
