"""The batch that scores all choices of a `select` after their common prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from graftlm.errors import InvalidPromptError
from graftlm.lang.choices import ChoiceScore

__all__ = ["ScoringBatch", "check_choices", "first_difference"]


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Prompts that are computed together. Each prompt is scored from its own start index on.

        prompt | choice 0          Only the tokens after the bar are scored. The tokens before it are equal,
        prompt | choice 1          except those that merge with a choice, and are computed once.
               | choice 0          The choices' tokens without the prompt, for unconditional log-probabilities.
               | choice 1

    Attributes:
        prompts: [choices] or [2 * choices], token ids; the choices without the prompt come last.
        starts: for each prompt, the index of the first token that is scored. A token at index 0 has no log-probability;
            it counts as 0.
        num_choices: number of choices.
    """

    prompts: list[list[int]]
    starts: list[int]
    num_choices: int

    @classmethod
    def of(cls, choices: Sequence[str], before: Sequence[int], whole: Sequence[list[int]], unconditional: bool) -> Self:
        """Create the batch.

        Args:
            before: token ids of the common prompt.
            whole: token ids of the prompt with each choice.
            unconditional: also score the choices without the prompt.

        Raises:
            InvalidPromptError: see `check_choices`.
        """
        starts = [first_difference(before, tokens) for tokens in whole]
        check_choices(choices, [len(tokens) for tokens in whole], starts)
        alone = [tokens[start:] for tokens, start in zip(whole, starts, strict=True)] if unconditional else []
        return cls([*whole, *alone], starts + [0] * len(alone), len(whole))

    def scores(self, logprobs: Sequence[Sequence[float]], cached_tokens: Sequence[int | None]) -> list[ChoiceScore]:
        """Return the choices' scores.

        Args:
            logprobs: log-probabilities of each prompt's tokens, from the prompt's start index on.
            cached_tokens: number of reused tokens of each prompt.
        """
        n = self.num_choices
        own = [tokens[start:] for tokens, start in zip(self.prompts[:n], self.starts[:n], strict=True)]
        alone: list[tuple[float, ...] | None] = [tuple(row) for row in logprobs[n:]] or [None] * n
        rows = zip(own, logprobs[:n], alone, cached_tokens[:n], strict=True)
        return [ChoiceScore(tuple(t), tuple(given), a, cached) for t, given, a, cached in rows]


def first_difference(before: Sequence[int], whole: Sequence[int]) -> int:
    """Return the number of common first tokens of two lists.

    The first letters of a choice may merge with the end of the prompt into one token ("token healing"). Such a token
    belongs to the choice.
    """
    pairs = enumerate(zip(before, whole, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(before), len(whole)))


def check_choices(choices: Sequence[str], lens: Sequence[int], starts: Sequence[int]) -> None:
    """Check that each choice can be scored.

    Raises:
        InvalidPromptError: a choice adds no token to the prompt, or no token precedes the choice.
    """
    for choice, length, start in zip(choices, lens, starts, strict=True):
        if length <= start:
            raise InvalidPromptError(f"choice {choice!r} adds no token to its prompt")
        if start == 0:
            raise InvalidPromptError(f"choice {choice!r} has no token before it; give the program text before a select")
