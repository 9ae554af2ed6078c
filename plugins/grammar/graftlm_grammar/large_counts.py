r"""Repetitions of one character more than 128 times, in forms that xgrammar reads soundly.

xgrammar 0.2.8 treats a repetition of a character class differently when its count exceeds 128: masks may then disagree
with `accept`. Measured, every token of a vocabulary against `accept`:

| class, as written | counts above 128 | disagreement |
|---|---|---|
| ASCII only, `[a-z]` | any | none |
| with others, `[b-z\u0080-\ud7ff\ue000-\U0010ffff]` | any | `bad` is allowed and then rejected |
| all but few others, `[^a\ud800-\udfff]`, before what it leaves out | {m,n}, m up to 128; {m,} | none |
| the same | {m,n}, m above 128 | tokens are missing |
| the same, before what it holds, `[^a\ud800-\udfff]{0,150} [^b]{50}` | {m,n} | some are allowed and then rejected |
| few others, `[^\u0000-\u0060\u007b-\u00e8\u00ea-\U0010ffff]` | any | some bytes are allowed and then rejected |

| with others, `[b-z\u0080-\uffff]{50}`, before a repetition of such a class | up to 128, too | as in the second row |

So a class of nearly all characters is written as what it leaves out (by `library_text`) where one of these must
follow, as the quote after a JSON string; any other repetition is divided into some of at most 128. Each of these is a
rule of its own with a lookahead, any character: without it the library takes what follows the rule as its lookahead,
which leads to the last row. They cost more where a token reaches from one part into the next.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from graftlm_grammar.char_set import CharSet, complement, minus, union
from graftlm_grammar.ebnf import EMPTY, Alternatives, Chars, Expression, Reference, Repeated, Sequence, references

__all__ = ["MAX_PLAIN_COUNT", "SoundRules", "is_nearly_all", "sound_counts"]

#: Up to this count, the library writes a repetition out.
MAX_PLAIN_COUNT: Final = 128
_LAST_ASCII: Final = 0x7F
#: Written as *, + and ?, which the library reads well.
_PLAIN_COUNTS: Final = {(0, None), (1, None), (0, 1)}
#: Characters beyond ASCII that a class may leave out and be written as what it leaves out. ECMAScript's `\S` leaves 21.
_MAX_LEFT_OUT: Final = 64


@dataclass(frozen=True, slots=True)
class SoundRules:
    """Rules whose counts the library reads soundly.

    Attributes:
        rules: name -> expression.
        followed: the rules that are written with any character as their lookahead.
    """

    rules: Mapping[str, Expression]
    followed: frozenset[str]


def sound_counts(rules: Mapping[str, Expression]) -> SoundRules:
    """Return rules that accept the same texts.

    Args:
        rules: name -> expression, each that one refers to among them.
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
    """Whether a class that is not empty holds no character beyond ASCII."""
    return chars[-1][1] <= _LAST_ASCII


def is_nearly_all(chars: CharSet) -> bool:
    """Whether a class holds nearly all characters beyond ASCII."""
    left_out = [(max(first, _LAST_ASCII + 1), last) for first, last in complement(chars) if last > _LAST_ASCII]
    return sum(last - first + 1 for first, last in left_out) <= _MAX_LEFT_OUT


class _Rewriting:
    """Rewrites expressions.

    Attributes:
        parts: repetition -> the rule that it is.
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
            after: the characters that may follow it; none at the end of the text, None if they are not known.
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
        """Return an expression of so many of a character."""
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
        """Return an expression of at most so many of a character: a part is full before the next one begins."""
        num_blocks, num_left = divmod(most, MAX_PLAIN_COUNT)
        full = self._part(chars, MAX_PLAIN_COUNT, MAX_PLAIN_COUNT)
        expression = self._part(chars, 0, num_left) if num_left else EMPTY
        for _ in range(num_blocks):
            shorter = self._part(chars, 0, MAX_PLAIN_COUNT - 1)
            expression = Alternatives((shorter, Sequence((full, expression))))
        return expression

    def _part(self, chars: Chars, least: int, most: int | None) -> Expression:
        """Return a reference to the rule of a repetition."""
        return Reference(self.parts.setdefault(Repeated(chars, least, most), f"{self._prefix}{len(self.parts)}"))


def _flat(sequence: Sequence) -> list[Expression]:
    """Return the items of a sequence, those of sequences within it included."""
    found: list[Expression] = []
    for item in sequence.items:
        found += _flat(item) if isinstance(item, Sequence) else [item]
    return found


def _as_chars(expression: Expression, one_char: Mapping[str, Chars]) -> Chars | None:
    """Return the class that an expression comes to, None if it is more than one character, or none."""
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
    """Return the rules that are one character."""
    found: dict[str, Chars] = {}
    num_before = -1
    while num_before < len(found):
        num_before = len(found)
        for name, expression in rules.items():
            if name not in found and (chars := _as_chars(expression, found)) is not None:
                found[name] = chars
    return found
