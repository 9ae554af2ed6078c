"""Where a choice's own tokens begin: behind those that it shares with its prompt."""

from collections.abc import Sequence

from graftlm.errors import InvalidPromptError

__all__ = ["check_choices", "first_difference"]


def first_difference(before: Sequence[int], whole: Sequence[int]) -> int:
    """Return how many tokens two lists begin with in common.

    A choice may merge with the end of its prompt into other tokens ("token healing"); those count as the choice's.
    """
    pairs = enumerate(zip(before, whole, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(before), len(whole)))


def check_choices(choices: Sequence[str], lens: Sequence[int], starts: Sequence[int]) -> None:
    """Check that there is something to score.

    Raises:
        InvalidPromptError: a choice has no token of its own, or none before it.
    """
    for choice, length, start in zip(choices, lens, starts, strict=True):
        if length <= start:
            raise InvalidPromptError(f"choice {choice!r} adds no token to its prompt")
        if start == 0:
            raise InvalidPromptError(f"choice {choice!r} has no token before it; give the program text before a select")
