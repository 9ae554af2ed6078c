"""Checks a specification's text before it is parsed, and adds the kind of specification to errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError

__all__ = ["check_text", "count_of", "reading_regex"]


def check_text(spec: GrammarSpec, max_len: int) -> None:
    """Check the length and the characters of a specification.

    Args:
        spec: the specification.
        max_len: maximum number of characters.

    Raises:
        GrammarError: the text is too long or has unpaired surrogates; the message names the kind of specification.
    """
    kind = spec.kind.value
    if len(spec.text) > max_len:
        raise GrammarError(f"{kind}: got {len(spec.text)} characters, expected at most {max_len}")
    try:
        spec.text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{kind}: not text: {error}") from None


@contextmanager
def reading_regex() -> Iterator[None]:
    """Add the prefix `regex:` to the errors of a block.

    Raises:
        GrammarError: the block raised the error.
    """
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{GrammarKind.REGEX.value}: {error}") from error


def count_of(digits: str) -> int:
    """Return the number that digits represent. Digits after the tenth are ignored, because ten exceed every limit."""
    return int(digits.lstrip("0")[:10] or "0")
