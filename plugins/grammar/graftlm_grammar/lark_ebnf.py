r"""Translates Lark grammars to EBNF.

The package `lark` parses a grammar. Terminals and rules both become rules of EBNF, and text of ignored terminals may
follow each terminal. EBNF has no lexer: if several terminals match the same text, all of them are tried, and priorities
have no effect.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any, Final

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import CharSet, union
from graftlm_grammar.choice import quoted_text
from graftlm_grammar.ebnf import MAX_COUNT, Alternatives, Chars, Expression, Repeated, Sequence, read_ebnf
from graftlm_grammar.ebnf_text import ebnf_text
from graftlm_grammar.regex import regex_to_ebnf

__all__ = ["as_ebnf"]

_EBNF_RULE: Final = re.compile(r"^[ \t]*[a-zA-Z_][a-zA-Z0-9_.-]*[ \t]*::=", re.MULTILINE)
_LARK_RULE: Final = re.compile(
    r"^[ \t]*[?!]*[a-zA-Z_][a-zA-Z0-9_]*(?:\{[^}\n]*\})?(?:[ \t]*\.-?[0-9]+)?[ \t]*:", re.MULTILINE
)
_LLGUIDANCE: Final = re.compile(r"\s*%llguidance\b")
_MAX_LARK_LEN: Final = 65_536
_ROOT: Final = "root"
_START: Final = "start"
_IGNORED: Final = "ignored-text"
#: The modules that grammars may import terminals from.
_MODULES: Final = ("common", "unicode")
#: The definition of common._STRING_ESC_INNER, which Lark writes with a lookbehind.
_STRING_CHARS: Final = r'([^"\\\n] | "\\" [^\n])*'
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", '"': '"', "\\": "\\"}


def as_ebnf(text: str) -> str:
    """Return a grammar as EBNF. A grammar in EBNF is returned unchanged, and a Lark grammar is translated.

    Raises:
        GrammarError: the Lark grammar is malformed, EBNF cannot express a part of it, or `lark` is not installed.
    """
    if _LLGUIDANCE.match(text):
        raise GrammarError("ebnf: only the backend llguidance accepts grammars that begin with %llguidance")
    if _EBNF_RULE.search(text) or not _LARK_RULE.search(text):
        return text
    if len(text) > _MAX_LARK_LEN:
        raise GrammarError(f"ebnf: got a Lark grammar of {len(text)} characters, expected at most {_MAX_LARK_LEN}")
    try:
        return _Translation(_parse(text)).ebnf()
    except RecursionError:
        raise GrammarError("ebnf: the Lark grammar is nested too deeply") from None


def _parse(text: str) -> Any:
    try:
        parser = _lark_parser()
    except ImportError:
        raise GrammarError("ebnf: Lark grammars need the package lark: pip install 'graftlm[outlines]'") from None
    from lark.exceptions import UnexpectedInput

    try:
        return parser.parse(text)
    except UnexpectedInput as error:
        where = f"line {error.line}, column {error.column}" if error.line > 0 else "the end"
        raise GrammarError(f"ebnf: Lark grammar, {where}: expected a rule, a terminal or a statement of Lark") from None


@cache
def _lark_parser() -> Any:
    """Return a parser of Lark grammars."""
    from lark import Lark

    return Lark.open_from_package("lark", "lark.lark", ("grammars",), parser="lalr")


@cache
def _module(name: str) -> dict[str, Any]:
    """Return the syntax trees of the terminals in a module of Lark, by name."""
    tree = _lark_parser().parse(files("lark").joinpath("grammars", f"{name}.lark").read_text("utf-8"))
    return {str(definition.children[0]): definition.children[-1] for definition in tree.find_data("token")}


class _Translation:
    """The rules of EBNF that a Lark grammar is translated into.

    Names in Lark contain no dash, so that `ignored-text` and the names of imported terminals are unambiguous.
    """

    def __init__(self, grammar: Any) -> None:
        self._rules: dict[str, str] = {}
        self._literals: dict[str, str] = {}  # a grammar may repeat a literal thousands of times
        self._ignored = [statement.children[0] for statement in grammar.children if statement.data == "ignore"]
        self._suffix = f" {_IGNORED}" * bool(self._ignored)
        for statement in grammar.children:
            self._read(statement)

    def ebnf(self) -> str:
        if _START not in self._rules:
            raise GrammarError(f"ebnf: a Lark grammar needs a rule named {_START}, got {', '.join(self._rules)[:80]}")
        lines = [f"{_ROOT} ::={self._suffix} {_START}"]
        if self._ignored:
            branches = [self._text(tree, suffix="") for tree in self._ignored]
            lines.append(f"{_IGNORED} ::= ({' | '.join(branches)})*")
        return "\n".join([*lines, *(f"{name} ::= {text}" for name, text in self._rules.items())])

    def _read(self, statement: Any) -> None:
        kind, children = str(statement.data), statement.children
        if kind == "token":
            self._define(str(children[0]), children, suffix="")
        elif kind == "rule":
            self._define(str(children[0]).lstrip("!?"), children, self._suffix)
        elif kind == "import":
            path, alias = children
            self._import(path, alias)
        elif kind == "multi_import":
            path, names = children
            for name in names.children:
                self._import(path, name, (str(name.children[0]),))
        elif kind != "ignore":
            raise GrammarError(f"ebnf: the Lark statement %{kind.partition('_')[0]} is not supported")

    def _define(self, name: str, children: list[Any], suffix: str) -> None:
        if any(parameter is not None for parameter in children[1].children):
            raise GrammarError(f"ebnf: rule {name}: Lark templates are not supported; write the rule out")
        self._add(name, self._text(children[-1], suffix))

    def _add(self, name: str, text: str) -> None:
        name = _rule_name(name)
        if name in self._rules:
            raise GrammarError(f"ebnf: {name} is defined twice")
        self._rules[name] = text

    def _import(self, path: Any, alias: Any, names: tuple[str, ...] = ()) -> None:
        """Import a terminal: `%import common.WORD`, `%import common.WORD -> ALIAS`, `%import common (WORD, INT)`."""
        dotted = "".join(map(str, path.scan_values(lambda _: True)))
        module, *rest = [*dotted.split("."), *names]
        if module not in _MODULES or len(rest) != 1:
            raise GrammarError(f"ebnf: %import {dotted[:80]}: expected a terminal of common or unicode")
        if rest[0] not in _module(module):
            raise GrammarError(f"ebnf: %import {module}.{rest[0][:80]}: there is no such terminal")
        self._add(rest[0] if alias is None else str(alias.children[0]), self._imported(module, rest[0]))

    def _imported(self, module: str, name: str) -> str:
        """Add a module's terminal and those that it refers to. Return the name of its rule."""
        own = f"{module}-{name}"
        if own not in self._rules:
            self._rules[own] = ""  # a terminal is not recursive; the rule keeps its position before those it refers to
            is_string = name == "_STRING_ESC_INNER"
            self._rules[own] = _STRING_CHARS if is_string else self._text(_module(module)[name], "", module)
        return own

    def _text(self, tree: Any, suffix: str, module: str = "") -> str:
        """Return an expression as EBNF.

        Args:
            tree: syntax tree of the expression.
            suffix: text to write after each terminal.
            module: the module that names refer to; empty: the grammar itself.
        """
        kind, children = str(tree.data), tree.children
        if kind == "name":
            name = str(children[0])
            if module:
                return self._imported(module, name)
            return _rule_name(name.lstrip("!?")) + suffix * name.isupper()
        if kind == "literal":
            return f"({self._literal(str(children[0]))}){suffix}"
        if kind == "literal_range":
            return f"{_range(*map(str, children))}{suffix}"
        if kind == "template_usage":
            raise GrammarError("ebnf: Lark templates are not supported; write the rule out")
        if kind == "alias":
            return self._text(children[0], suffix, module)
        if kind == "expr":
            item, operators = self._text(children[0], suffix, module), [str(child) for child in children[1:] if child]
            if not operators:
                return item
            counts = "{" + ",".join(operators) + "}"
            return f"({item}){counts if operators[0].isdigit() else operators[0]}"
        parts = [self._text(child, suffix, module) for child in children if child is not None]
        if kind == "maybe":
            return f"({parts[0]})?"
        if kind == "expansions":
            return " | ".join(parts)
        return " ".join(f"({part})" if " | " in part else part for part in parts) or '""'

    def _literal(self, token: str) -> str:
        if token not in self._literals:
            self._literals[token] = _literal(token)
        return self._literals[token]


def _rule_name(name: str) -> str:
    return "lark-root" if name == _ROOT else name


def _literal(token: str) -> str:
    """Return the expression of a string or of a regular expression, with its flags.

    Raises:
        GrammarError: there are flags other than `i` and `u`, or a grammar cannot express the regular expression.
    """
    end = token.rfind(token[0])
    flags = set(token[end + 1 :])
    if flags - set("iu"):
        raise GrammarError(f"ebnf: {token[:80]}: the flag {min(flags - set('iu'))} is not supported")
    try:
        text = regex_to_ebnf(token[1:end]) if token[0] == "/" else quoted_text(_unescaped(token[1:end]))
    except GrammarError as error:
        raise GrammarError(f"ebnf: {token[:80]}: {error}") from None
    if "i" not in flags:
        return text
    return ebnf_text({_ROOT: _any_case(read_ebnf(f"{_ROOT} ::= {text}", MAX_COUNT)[_ROOT])}).partition("::= ")[2]


def _range(first: str, last: str) -> str:
    ends = [_unescaped(token[1:-1]) for token in (first, last)]
    if any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
        raise GrammarError(f"ebnf: {first[:20]}..{last[:20]}: expected two characters in ascending order")
    return f"[\\U{ord(ends[0]):08x}-\\U{ord(ends[1]):08x}]"


def _unescaped(text: str) -> str:
    """Return the characters of a string of Lark. A backslash before another character than those of escapes remains."""

    def character(found: re.Match[str]) -> str:
        code = found.group(1) or found.group(2) or found.group(3)
        if code is None:
            return _CONTROLS.get(found.group(4), found.group())
        if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) <= 0xDFFF:
            raise GrammarError(f"{found.group()} is not a character")
        return chr(int(code, 16))

    return _ESCAPE.sub(character, text)


def _any_case(expression: Expression) -> Expression:
    match expression:
        case Chars(chars):
            return Chars(_with_other_case(chars))
        case Sequence(items):
            return Sequence(tuple(map(_any_case, items)))
        case Alternatives(branches):
            return Alternatives(tuple(map(_any_case, branches)))
        case Repeated(item, least, most):
            return Repeated(_any_case(item), least, most)
    return expression


def _with_other_case(chars: CharSet) -> CharSet:
    """Add the other case of each ASCII letter, and of each other letter in ranges of fewer than 256 characters."""
    others = []
    for first, last in chars:
        codes = range(first, last + 1) if last - first < 256 else [*range(0x41, 0x5B), *range(0x61, 0x7B)]
        swapped = [chr(code).swapcase() for code in codes if first <= code <= last]
        others += [(ord(other), ord(other)) for other in swapped if len(other) == 1]
    return union(chars, others)
