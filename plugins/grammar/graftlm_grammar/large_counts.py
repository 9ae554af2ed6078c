r"""Rewrites repetitions of a character class of more than 128 times, in forms for which xgrammar's masks are correct.

xgrammar 0.2.8 treats a repetition of a character class differently if its count exceeds 128: masks may then disagree
with `accept`. These disagreements were found by testing every token of a vocabulary with `accept`:

| class, as written | counts above 128 | disagreement |
|---|---|---|
| only ASCII, `[a-z]` | any | none |
| also non-ASCII, `[b-z\u0080-\ud7ff\ue000-\U0010ffff]` | any | `bad` is allowed and then rejected |
| nearly all, negated, `[^a\ud800-\udfff]`, followed by an excluded character | {m,n}, m up to 128; {m,} | none |
| the same | {m,n}, m above 128 | tokens are missing |
| the same, followed by an included one, `[^a\ud800-\udfff]{0,150} [^b]{50}` | {m,n} | some are allowed, then rejected |
| few non-ASCII, negated, `[^\u0000-\u0060\u007b-\u00e8\u00ea-\U0010ffff]` | any | bytes are allowed, then rejected |
| also non-ASCII, `[b-z\u0080-\uffff]{50}`, before a repetition of such a class | also up to 128 | as in row 2 |

Therefore, a class of nearly all characters is written as a negated class (by `library_text`) if an excluded character
must follow, such as the quote after a JSON string. Any other repetition is divided into parts of at most 128. Each part
is a separate rule with a lookahead of any character. Without the lookahead, the library uses the text after the rule as
lookahead, which causes the disagreement of the last row. The division into parts makes masks slower for tokens that
extend over two parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from graftlm_grammar.char_set import CharSet, complement, minus, union
from graftlm_grammar.ebnf import EMPTY, Alternatives, Chars, Expression, Reference, Repeated, Sequence, references

__all__ = ["MAX_PLAIN_COUNT", "SoundRules", "is_nearly_all", "sound_counts"]

#: Maximum count of a repetition that the library expands.
MAX_PLAIN_COUNT: Final = 128
_LAST_ASCII: Final = 0x7F
#: The counts that are written as *, + and ?; the library handles them correctly.
_PLAIN_COUNTS: Final = {(0, None), (1, None), (0, 1)}
#: Maximum number of excluded non-ASCII characters of a class of nearly all characters. ECMAScript's `\S` excludes 21.
_MAX_EXCLUDED: Final = 64


@dataclass(frozen=True, slots=True)
class SoundRules:
    """Rules for which the library's masks are correct.

    Attributes:
        rules: name -> expression.
        followed: the rules that get a lookahead of any character.
    """

    rules: Mapping[str, Expression]
    followed: frozenset[str]


def sound_counts(rules: Mapping[str, Expression]) -> SoundRules:
    """Return rules that accept the same texts and for which the library's masks are correct.

    Args:
        rules: name -> expression; every referenced rule is among them.
    """
    rewriting = _Rewriting(rules)
    is_within = any("root" in references(expression) for expression in rules.values())
    written = {
        name: rewriting.sound(expression, () if name == "root" and not is_within else None)
        for name, expression in rules.items()
    }
    parts = {name: part for part, name in rewriting.parts.items()}
    return SoundRules(written | parts, frozenset(parts))


def is_ascii(chars: CharSet) -> bool:
    """Return whether a non-empty class has only ASCII characters."""
    return chars[-1][1] <= _LAST_ASCII


def is_nearly_all(chars: CharSet) -> bool:
    """Return whether a class has nearly all non-ASCII characters."""
    excluded = [(max(first, _LAST_ASCII + 1), last) for first, last in complement(chars) if last > _LAST_ASCII]
    return sum(last - first + 1 for first, last in excluded) <= _MAX_EXCLUDED


class _Rewriting:
    """Rewrites the expressions of one grammar for `sound_counts`.

    Attributes:
        parts: repetition -> name of the rule that replaces it.
    """

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self.parts: dict[Repeated, str] = {}
        self._one_char = _one_char_rules(rules)
        self._prefix = "c"
        while any(name.startswith(self._prefix) for name in rules):
            self._prefix += "c"

    def sound(self, expression: Expression, after: CharSet | None) -> Expression:
        """Rewrite an expression.

        Args:
            expression: the expression.
            after: the characters that can follow the expression; empty at the end of the text, None if unknown.
        """
        match expression:
            case Sequence():
                sound: list[Expression] = []
                for item in reversed(_flat(expression)):
                    sound.append(self.sound(item, after))
                    chars = _as_chars(item, self._one_char)
                    after = None if chars is None else chars.chars
                return sound[0] if len(sound) == 1 else Sequence(tuple(reversed(sound)))
            case Alternatives(branches):
                return Alternatives(tuple(self.sound(branch, after) for branch in branches))
            case Repeated(item, least, most):
                chars = _as_chars(item, self._one_char)
                if chars is None:
                    return Repeated(self.sound(item, None), least, most)
                return self._repeated(chars, least, most, after)
        return expression

    def _repeated(self, chars: Chars, least: int, most: int | None, after: CharSet | None) -> Expression:
        """Return an expression of `least` to `most` characters of a class.

        Args:
            chars: the class.
            least: minimum number of characters.
            most: maximum number of characters; None: no maximum.
            after: the characters that can follow; see `sound`.
        """
        is_plain = is_ascii(chars.chars) or (least, most) in _PLAIN_COUNTS
        if is_plain:
            return Repeated(chars, least, most)
        if max(least, most or 0) <= MAX_PLAIN_COUNT:
            return self._part(chars, least, most)
        if is_nearly_all(chars.chars) and after is not None and minus(after, chars.chars) == after:
            num_blocks = 0 if most is None else max(0, -(-least // MAX_PLAIN_COUNT) - 1)
            num_chars = num_blocks * MAX_PLAIN_COUNT
            block = Repeated(chars, MAX_PLAIN_COUNT, MAX_PLAIN_COUNT)
            rest = Repeated(chars, least - num_chars, None if most is None else most - num_chars)
            return Sequence((*[block] * num_blocks, rest)) if num_blocks else rest
        num_blocks, num_left = divmod(least, MAX_PLAIN_COUNT)
        required: list[Expression] = [self._part(chars, MAX_PLAIN_COUNT, MAX_PLAIN_COUNT)] * num_blocks
        if num_left:
            required.append(self._part(chars, num_left, num_left))
        return Sequence((*required, Repeated(chars, 0, None) if most is None else self._up_to(chars, most - least)))

    def _up_to(self, chars: Chars, most: int) -> Expression:
        """Return an expression of at most `most` characters of a class; each part is full before the next starts."""
        num_blocks, num_left = divmod(most, MAX_PLAIN_COUNT)
        full = self._part(chars, MAX_PLAIN_COUNT, MAX_PLAIN_COUNT)
        expression = self._part(chars, 0, num_left) if num_left else EMPTY
        for _ in range(num_blocks):
            shorter = self._part(chars, 0, MAX_PLAIN_COUNT - 1)
            expression = Alternatives((shorter, Sequence((full, expression))))
        return expression

    def _part(self, chars: Chars, least: int, most: int | None) -> Expression:
        """Return a reference to the rule of a repetition; add the rule at its first use."""
        return Reference(self.parts.setdefault(Repeated(chars, least, most), f"{self._prefix}{len(self.parts)}"))


def _flat(sequence: Sequence) -> list[Expression]:
    """Return the items of a sequence, with nested sequences flattened."""
    found: list[Expression] = []
    for item in sequence.items:
        found += _flat(item) if isinstance(item, Sequence) else [item]
    return found


def _as_chars(expression: Expression, one_char: Mapping[str, Chars]) -> Chars | None:
    """Return the class that an expression is equivalent to; None if it does not match exactly one character."""
    match expression:
        case Chars():
            return expression
        case Reference(name):
            return one_char.get(name)
        case Sequence(items):
            parts = [item for item in items if item != EMPTY]
            return _as_chars(parts[0], one_char) if len(parts) == 1 else None
        case Repeated(item, 1, 1):
            return _as_chars(item, one_char)
        case Alternatives(branches):
            sets = [chars.chars for branch in branches if (chars := _as_chars(branch, one_char)) is not None]
            return Chars(union(*sets)) if len(sets) == len(branches) else None
    return None


def _one_char_rules(rules: Mapping[str, Expression]) -> dict[str, Chars]:
    """Return the rules that match exactly one character, with their classes."""
    found: dict[str, Chars] = {}
    num_before = -1
    while num_before < len(found):
        num_before = len(found)
        for name, expression in rules.items():
            if name not in found and (chars := _as_chars(expression, found)) is not None:
                found[name] = chars
    return found
