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

So a class of nearly all characters is written as what it leaves out (by `library_text`) where one of these must
follow, as the quote after a JSON string; any other repetition is divided into some of at most 128. These cost more
where a token reaches from one part into the next.
"""

from collections.abc import Mapping
from typing import Final

from graftlm_grammar.char_set import CharSet, complement, minus, union
from graftlm_grammar.ebnf import EMPTY, Alternatives, Chars, Expression, Reference, Repeated, Sequence, references

__all__ = ["MAX_PLAIN_COUNT", "is_ascii", "is_nearly_all", "sound_counts"]

#: Up to this count, the library writes a repetition out.
MAX_PLAIN_COUNT: Final = 128
_LAST_ASCII: Final = 0x7F
#: Characters beyond ASCII that a class may leave out and be written as what it leaves out. ECMAScript's `\S` leaves 21.
_MAX_LEFT_OUT: Final = 64


def sound_counts(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Return rules that accept the same texts, and whose counts above 128 the library reads soundly.

    Args:
        rules: name -> expression, each that one refers to among them.
    """
    one_char = _one_char_rules(rules)
    is_within = any("root" in references(expression) for expression in rules.values())
    return {
        name: _sound(expression, one_char, () if name == "root" and not is_within else None)
        for name, expression in rules.items()
    }


def is_ascii(chars: CharSet) -> bool:
    """Whether a class that is not empty holds no character beyond ASCII."""
    return chars[-1][1] <= _LAST_ASCII


def is_nearly_all(chars: CharSet) -> bool:
    """Whether a class holds nearly all characters beyond ASCII."""
    left_out = [(max(first, _LAST_ASCII + 1), last) for first, last in complement(chars) if last > _LAST_ASCII]
    return sum(last - first + 1 for first, last in left_out) <= _MAX_LEFT_OUT


def _sound(expression: Expression, one_char: Mapping[str, Chars], after: CharSet | None) -> Expression:
    """Rewrite an expression.

    Args:
        after: the characters that may follow it; none at the end of the text, None if they are not known.
    """
    match expression:
        case Sequence():
            sound: list[Expression] = []
            for item in reversed(_flat(expression)):
                sound.append(_sound(item, one_char, after))
                chars = _as_chars(item, one_char)
                after = None if chars is None else chars.chars
            return sound[0] if len(sound) == 1 else Sequence(tuple(reversed(sound)))
        case Alternatives(branches):
            return Alternatives(tuple(_sound(branch, one_char, after) for branch in branches))
        case Repeated(item, least, most):
            chars = _as_chars(item, one_char)
            if chars is None:
                return Repeated(_sound(item, one_char, None), least, most)
            return _repeated(chars, least, most, after)
    return expression


def _flat(sequence: Sequence) -> list[Expression]:
    """Return the items of a sequence, those of sequences within it included."""
    found: list[Expression] = []
    for item in sequence.items:
        found += _flat(item) if isinstance(item, Sequence) else [item]
    return found


def _repeated(chars: Chars, least: int, most: int | None, after: CharSet | None) -> Expression:
    """Return an expression of so many of a character."""
    is_small = max(least, most or 0) <= MAX_PLAIN_COUNT
    if is_small or is_ascii(chars.chars):
        return Repeated(chars, least, most)
    block = Repeated(chars, MAX_PLAIN_COUNT, MAX_PLAIN_COUNT)
    if is_nearly_all(chars.chars) and after is not None and minus(after, chars.chars) == after:
        if most is None:
            return Repeated(chars, least, None)
        num_blocks = max(0, -(-least // MAX_PLAIN_COUNT) - 1)
        num_chars = num_blocks * MAX_PLAIN_COUNT
        return Sequence((*[block] * num_blocks, Repeated(chars, least - num_chars, most - num_chars)))
    num_blocks, num_left = divmod(least, MAX_PLAIN_COUNT)
    required = (*[block] * num_blocks, Repeated(chars, num_left, num_left)) if num_left else (block,) * num_blocks
    rest = Repeated(chars, 0, None) if most is None else _up_to(chars, most - least)
    return Sequence((*required, rest))


def _up_to(chars: Chars, most: int) -> Expression:
    """Return an expression of at most so many of a character: a part is full before the next one begins."""
    num_blocks, num_left = divmod(most, MAX_PLAIN_COUNT)
    full = Repeated(chars, MAX_PLAIN_COUNT, MAX_PLAIN_COUNT)
    expression: Expression = Repeated(chars, 0, num_left) if num_left else EMPTY
    for _ in range(num_blocks):
        expression = Alternatives((Repeated(chars, 0, MAX_PLAIN_COUNT - 1), Sequence((full, expression))))
    return expression


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
