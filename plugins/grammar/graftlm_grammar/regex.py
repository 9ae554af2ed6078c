r"""Translates ECMAScript regular expressions to EBNF.

xgrammar also reads regular expressions, but interprets some incorrectly: it ignores anchors and lookarounds, reads \z
as z, and in the patterns of JSON schemas lets `(ab+)?` match "b". This translation is exact; expressions that a grammar
cannot express are refused.
"""

import re
from typing import Final

from graftlm.errors import GrammarError
from graftlm_grammar.char_set import (
    DIGIT,
    LINE_END,
    SPACE,
    WORD,
    CharSet,
    complement,
    ebnf_class,
    minus,
    union,
)
from graftlm_grammar.enforcement import NotEnforcedError
from graftlm_grammar.spec_text import count_of

__all__ = ["MAX_REPEATS", "regex_to_ebnf"]

#: The largest number in {m,n}, and the largest product of nested counts. A matcher's memory grows with the square of
#: the count.
MAX_REPEATS: Final = 1000

_MAX_DEPTH: Final = 100
_ANY: Final = complement(())
_QUANTIFIER: Final = re.compile(r"([*+?]|\{([0-9]+)(?:(,)([0-9]*))?\})\??")  # a final ? (lazy) has no effect here
_POSIX: Final = re.compile(r"\[([:.=])\^?\w+\1\]")  # ECMAScript reads [[:alpha:]] as a character of "[:alph", then "]"
_CODE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))")
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_CLASSES: Final = {
    "d": DIGIT,
    "D": complement(DIGIT),
    "w": WORD,
    "W": complement(WORD),
    "s": SPACE,
    "S": complement(SPACE),
}


def regex_to_ebnf(regex: str, alphabet: CharSet = _ANY, search: bool = False) -> str:
    """Return an EBNF expression for the texts that a regular expression matches as a whole.

    Args:
        regex: the regular expression.
        alphabet: the characters that may occur; `IN_JSON_STRING` for the pattern of a JSON schema.
        search: whether to accept texts in which the expression matches anywhere; ^ and $ then anchor it.

    Raises:
        NotEnforcedError: a grammar cannot express the regular expression; the message names the position.
        GrammarError: the regular expression is malformed; the message names the position.
    """
    return _Parser(regex, alphabet, search).parse()


class _Parser:
    """Reads a regular expression once, from left to right."""

    def __init__(self, regex: str, alphabet: CharSet, search: bool) -> None:
        self._regex = regex
        self._alphabet = alphabet
        self._search = search
        self._at = 0

    def parse(self) -> str:
        text, _ = self._alternatives(depth=0)
        if self._at < len(self._regex):
            raise self._error("unmatched )")
        return text

    def _alternatives(self, depth: int) -> tuple[str, int]:
        """Read to the end of a group. Returns its expression, and the largest product of nested counts in the group."""
        if depth > _MAX_DEPTH:
            raise self._not_enforced(f"nested more than {_MAX_DEPTH} groups deep")
        branches, most = [], 1
        while True:
            text, repeats = self._branch(depth)
            branches.append(text)
            most = max(most, repeats)
            if self._peek() != "|":
                return " | ".join(branches), most
            self._at += 1

    def _branch(self, depth: int) -> tuple[str, int]:
        items, most = ['""'], 1
        starts_anywhere = ends_anywhere = self._search and depth == 0
        if depth == 0 and self._peek() == "^":
            self._at += 1
            starts_anywhere = False
        while self._peek() not in ("", "|", ")"):
            if depth == 0 and self._peek() == "$" and self._regex[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                ends_anywhere = False
                break
            item, repeats = self._item(depth)
            quantifier, count = self._quantifier()
            if repeats * count > MAX_REPEATS:
                raise self._not_enforced(f"more than {MAX_REPEATS} counted repetitions are not supported; use * or +")
            items.append(item + quantifier)
            most = max(most, repeats * count)
        anything = [f"{self._written(_ANY)}*"]
        items = [*(anything * starts_anywhere), *items, *(anything * ends_anywhere)]
        return " ".join(items), most

    def _item(self, depth: int) -> tuple[str, int]:
        char = self._peek()
        if char == "(":
            return self._group(depth)
        if char in "*+?{":
            raise self._error(f"{char} needs something to repeat; write \\{char} for the character")
        if char in "^$":
            raise self._not_enforced(
                f"{char} is enforced only at the {'start' if char == '^' else 'end'} of the whole expression"
            )
        if char == "[":
            return self._class(), 1
        if char == ".":
            self._at += 1
            return self._written(complement(LINE_END)), 1
        return self._written(self._one()), 1

    def _group(self, depth: int) -> tuple[str, int]:
        self._at += 1
        if self._peek() == "?":
            if not self._regex.startswith("?:", self._at):
                raise self._not_enforced("lookarounds, flags and named groups are not enforced; use (...) or (?:...)")
            self._at += 2
        text, repeats = self._alternatives(depth + 1)
        if self._peek() != ")":
            raise self._error("a ) is missing")
        self._at += 1
        return f"({text})", repeats

    def _quantifier(self) -> tuple[str, int]:
        found = _QUANTIFIER.match(self._regex, self._at)
        if found is None:
            return "", 1
        text, lower, comma, upper = found.groups()
        if upper and count_of(upper) < count_of(lower):
            raise self._error(f"{text[:80]}: the maximum is less than the minimum")
        self._at = found.end()
        if lower is None:
            return text, 1
        return f"{{{lower}{comma or ''}{upper or ''}}}", max(1, count_of(lower), count_of(upper or "1"))

    def _class(self) -> str:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts: list[CharSet] = []
        while self._peek() != "]":
            posix = _POSIX.match(self._regex, self._at)
            if posix is not None:
                raise self._not_enforced(f"{posix.group()} is not enforced; write the characters, such as a-z")
            low = self._one()
            is_range = self._peek() == "-" and self._regex[self._at + 1 : self._at + 2] not in ("", "]")
            if not is_range:
                parts.append(low)
                continue
            self._at += 1
            parts.append(self._range(low, self._one()))
        self._at += 1
        chars = union(*parts)
        return self._written(complement(chars) if negated else chars)

    def _range(self, low: CharSet, high: CharSet) -> CharSet:
        first, last = low[0][0], high[-1][1]
        if low != ((first, first),) or high != ((last, last),) or first > last:
            raise self._error("a range must go from one character to a later one; write \\- for a dash")
        return ((first, last),)

    def _one(self) -> CharSet:
        """Read one character, or an escape of a class of characters."""
        char = self._peek()
        if char == "":
            raise self._error("unexpected end")
        code = _CODE.match(self._regex, self._at)
        if code is not None:
            self._at = code.end()
            return self._char(chr(int(code.group(1) or code.group(2), 16)))
        if char != "\\":
            self._at += 1
            return self._char(char)
        escaped = self._regex[self._at + 1 : self._at + 2]
        self._at += 2
        if escaped in _CLASSES:
            return _CLASSES[escaped]
        if escaped == "":
            raise self._error("unexpected end")
        if escaped.isalnum() and escaped not in _CONTROLS:
            raise self._not_enforced(f"the escape \\{escaped} is not enforced")
        return self._char(_CONTROLS.get(escaped, escaped))

    def _char(self, char: str) -> CharSet:
        if "\ud800" <= char <= "\udfff":
            raise self._error("an unpaired surrogate cannot be matched; write the character itself")
        return ((ord(char), ord(char)),)

    def _written(self, chars: CharSet) -> str:
        possible = minus(chars, complement(self._alphabet))
        if not possible:
            hint = "" if self._alphabet == _ANY else ": JSON strings escape quotes, backslashes and control characters"
            raise self._error(f"no character can match here{hint}")
        return ebnf_class(possible)

    def _peek(self) -> str:
        return self._regex[self._at : self._at + 1]

    def _error(self, message: str) -> GrammarError:
        return GrammarError(f"regular expression {self._regex!r}, position {self._at}: {message}")

    def _not_enforced(self, message: str) -> NotEnforcedError:
        return NotEnforcedError(str(self._error(message)))
