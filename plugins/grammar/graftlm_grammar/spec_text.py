"""The text of a specification, before anybody reads it."""

from collections.abc import Iterator
from contextlib import contextmanager

from graftlm.contracts import GrammarKind, GrammarSpec
from graftlm.errors import GrammarError

__all__ = ["check_text", "count_of", "reading_regex"]


def check_text(spec: GrammarSpec, max_len: int) -> None:
    """Refuse a specification that is too long, or no text.

    Args:
        max_len: characters that are read.

    Raises:
        GrammarError: the message names the kind of specification.
    """
    kind = spec.kind.value
    if len(spec.text) > max_len:
        raise GrammarError(f"{kind}: {len(spec.text)} characters are too many, at most {max_len} are read")
    try:
        spec.text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{kind}: not text: {error}") from None


@contextmanager
def reading_regex() -> Iterator[None]:
    """Have what is refused in the block refused as a specification that is a regular expression.

    Raises:
        GrammarError: the message names the kind of specification.
    """
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{GrammarKind.REGEX.value}: {error}") from error


def count_of(digits: str) -> int:
    """Return how many repetitions digits ask for; of more than ten digits, that it is a thousand millions at least."""
    return int(digits.lstrip("0")[:10] or "0")
