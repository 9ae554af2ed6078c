"""Translates grammars without recursion to one expression, and that expression to a Rust regular expression."""

from collections.abc import Mapping
from typing import Final

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import CharSet, minus
from graftlm_grammar.ebnf import Alternatives, Chars, Expression, Reference, Repeated, Sequence

__all__ = ["ANY_DEPTH", "inlined", "rust_regex"]

#: Maximum nesting of arrays and objects in a value that a schema does not describe.
ANY_DEPTH: Final = 2

_MAX_SIZE: Final = 50_000  # maximum number of expressions; a repeated expression counts once
_NUL: Final[CharSet] = ((0, 0),)
_ANY: Final = "any"
_NESTING: Final = frozenset({"object", "array"})  # the alternatives of `any` that are not scalars


def inlined(rules: Mapping[str, Expression]) -> Expression:
    """Return the expression of `root` with each reference replaced by the rule's expression.

    Only JSON's rule `any` may be recursive; it is unrolled `ANY_DEPTH` times.

    Raises:
        GrammarError: another rule is recursive, or the result is too large.
    """
    return _Inliner(rules).rule("root", 0)


def rust_regex(expression: Expression) -> str:
    """Return an expression without references as a Rust regular expression, without anchors.

    U+0000 is excluded from all classes, because the automata use it as the start of a text.

    Raises:
        GrammarError: a class contains only U+0000.
    """
    match expression:
        case Chars(chars):
            chars = minus(chars, _NUL)
            if not chars:
                raise GrammarError("U+0000 is not enforced by outlines; use xgrammar or llguidance")
            ranges = [_char(first) + (f"-{_char(last)}" if last > first else "") for first, last in chars]
            return f"[{''.join(ranges)}]"
        case Sequence(items):
            return "".join(map(rust_regex, items))
        case Alternatives(branches):
            return f"(?:{'|'.join(map(rust_regex, branches))})"
        case Repeated(item, least, most):
            return f"(?:{rust_regex(item)}){{{least},{'' if most is None else most}}}"
        case Reference(name):
            raise ValueError(f"expected an expression without references, got a reference to {name}; inline it first")


def _char(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"


class _Inliner:
    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._rules = rules
        self._open: list[str] = []
        self._done: dict[tuple[str, int], tuple[Expression, int]] = {}
        self._size = 0

    def rule(self, name: str, any_depth: int) -> Expression:
        """Return the inlined expression of a rule that is inside `any_depth` nested `any` values."""
        if (name, any_depth) in self._done:
            done, size = self._done[name, any_depth]
            self._grow(size)
            return done
        if name != _ANY and name in self._open and name not in _NESTING:
            raise GrammarError("outlines does not support recursion; use xgrammar or llguidance")
        before = self._size
        self._open.append(name)
        body = self._rules[name]
        if name == _ANY:
            body = _scalars(body) if any_depth == ANY_DEPTH else body
            result = self._inline(body, any_depth + 1)
        else:
            result = self._inline(body, any_depth)
        self._open.pop()
        self._done[name, any_depth] = result, self._size - before
        return result

    def _inline(self, expression: Expression, any_depth: int) -> Expression:
        self._grow(1)
        match expression:
            case Chars():
                return expression
            case Reference(name):
                return self.rule(name, any_depth)
            case Sequence(items):
                return Sequence(tuple([self._inline(item, any_depth) for item in items]))
            case Repeated(item, least, most):
                return Repeated(self._inline(item, any_depth), least, most)
            case Alternatives(branches):
                shared = _shared_end(branches)
                if shared is not None:
                    return self._inline(shared, any_depth)
                return Alternatives(tuple([self._inline(branch, any_depth) for branch in branches]))

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > _MAX_SIZE:
            raise GrammarError("too large for an automaton; use xgrammar or llguidance, which do not need one")


def _shared_end(branches: tuple[Expression, ...]) -> Expression | None:
    """Return `(a)? b` for `a b | b`, otherwise None. In the form `a b | b`, each optional property doubles the size."""
    if len(branches) != 2 or not isinstance(branches[0], Sequence) or branches[0].items[-1:] != branches[1:]:
        return None
    return Sequence((Repeated(Sequence(branches[0].items[:-1]), 0, 1), branches[1]))


def _scalars(any_value: Expression) -> Expression:
    """Return the branches of `any` that are not recursive."""
    branches = any_value.branches if isinstance(any_value, Alternatives) else (any_value,)
    return Alternatives(tuple(b for b in branches if not (isinstance(b, Reference) and b.name in _NESTING)))
