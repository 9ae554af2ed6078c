"""Sets of characters, and their notation in EBNF."""

from collections.abc import Iterable
from typing import TypeAlias

__all__ = [
    "DIGIT",
    "IN_JSON_STRING",
    "LINE_END",
    "SPACE",
    "WORD",
    "CharSet",
    "complement",
    "ebnf_class",
    "minus",
    "union",
]

#: Ranges of code points (first, last), both inclusive, in ascending order; adjacent ranges are merged.
CharSet: TypeAlias = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_SURROGATES: CharSet = ((0xD800, 0xDFFF),)

DIGIT: CharSet = ((0x30, 0x39),)
WORD: CharSet = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE: CharSet = (
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
    *((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
LINE_END: CharSet = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))


def union(*sets: Iterable[tuple[int, int]]) -> CharSet:
    """Return the union of sets; their ranges may overlap and be in any order."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for one in sets for pair in one):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)


def complement(chars: CharSet) -> CharSet:
    """Return all characters that are not in a set. Surrogates (U+D800 to U+DFFF) are never in the result."""
    gaps, start = [], 0
    for first, last in union(chars, _SURROGATES):
        if start < first:
            gaps.append((start, first - 1))
        start = last + 1
    return (*gaps, (start, _LAST)) if start <= _LAST else tuple(gaps)


def minus(chars: CharSet, others: CharSet) -> CharSet:
    """Return the characters of `chars` that are not in `others`."""
    return complement(union(complement(chars), others))


def ebnf_class(chars: CharSet) -> str:
    """Return a non-empty set as an EBNF character class."""
    return f"[{''.join(_escape(first) + (f'-{_escape(last)}' if last > first else '') for first, last in chars)}]"


def _escape(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


#: The characters that need no escape in a JSON string: all except quotes, backslashes and control characters.
IN_JSON_STRING: CharSet = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
