"""The batch that scores all choices of a `select` behind their common prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from graftlm.errors import InvalidPromptError
from graftlm.lang.choices import ChoiceScore

__all__ = ["ScoringBatch", "check_choices", "first_difference"]


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Prompts to compute together, each scored from a token of its own on.

        prompt | choice 0          only the log-probabilities behind the bar are wanted; what precedes it is
        prompt | choice 1          the same for all, up to where tokens merge, and computed once
              | choice 0           the same tokens by themselves, when unconditional log-probabilities are wanted
              | choice 1

    Attributes:
        prompts: [choices], or [2 * choices] with those by themselves behind the others; token ids.
        starts: where the tokens to score begin in each of them. One at 0 has no log-probability and counts as 0.
        num_choices: of the prompts, those with a choice behind the common prompt.
    """

    prompts: list[list[int]]
    starts: list[int]
    num_choices: int

    @classmethod
    def of(cls, choices: Sequence[str], before: Sequence[int], whole: Sequence[list[int]], unconditional: bool) -> Self:
        """Make the batch of the tokens of the common prompt, and of prompt and choice together.

        Raises:
            InvalidPromptError: as `check_choices`.
        """
        starts = [first_difference(before, tokens) for tokens in whole]
        check_choices(choices, [len(tokens) for tokens in whole], starts)
        alone = [tokens[start:] for tokens, start in zip(whole, starts, strict=True)] if unconditional else []
        return cls([*whole, *alone], starts + [0] * len(alone), len(whole))

    def scores(self, logprobs: Sequence[Sequence[float]], cached_tokens: Sequence[int | None]) -> list[ChoiceScore]:
        """Return the choices' scores.

        Args:
            logprobs: of each prompt's tokens from its start on.
            cached_tokens: of each prompt.
        """
        n = self.num_choices
        own = [tokens[start:] for tokens, start in zip(self.prompts[:n], self.starts[:n], strict=True)]
        alone: list[tuple[float, ...] | None] = [tuple(row) for row in logprobs[n:]] or [None] * n
        rows = zip(own, logprobs[:n], alone, cached_tokens[:n], strict=True)
        return [ChoiceScore(tuple(t), tuple(given), a, cached) for t, given, a, cached in rows]


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
