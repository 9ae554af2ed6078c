"""Methods by which `select` picks a choice, given the log-probabilities of its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from graftlm.errors import RequestError

__all__ = [
    "CHOICES_METHODS",
    "ChoiceScore",
    "ChoicesMethod",
    "Decision",
    "greedy_token_selection",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
]


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """The tokens of one choice and their log-probabilities.

    Attributes:
        token_ids: [n], the choice's tokens after the prompt.
        logprobs: [n], natural logarithms; each given the prompt and the earlier tokens.
        unconditional_logprobs: [n], each given only the choice's earlier tokens; 0 for the first. None unless they were
            requested.
        cached_tokens: tokens of prompt and choice whose keys and values were reused; None if the backend does not
            report them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional_logprobs: tuple[float, ...] | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The selected choice.

    Attributes:
        index: index of the selected choice.
        scores: [choices]; the highest was selected, unless the method compared token by token.
    """

    index: int
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoicesMethod:
    """A method that selects one of several choices.

    Attributes:
        decide: a function from the scores of all choices to the decision.
        unconditional: whether `decide` needs the unconditional log-probabilities.
    """

    name: str
    decide: Callable[[Sequence[ChoiceScore]], Decision]
    unconditional: bool = False

    def take(self, scores: Sequence[ChoiceScore]) -> Decision:
        """Call `decide` and check its result.

        Raises:
            RequestError: the result is no Decision, or its index is out of range.
        """
        decision = self.decide(scores)
        if not isinstance(decision, Decision) or decision.index not in range(len(scores)):
            raise RequestError(
                f"choices_method {self.name!r} must return a Decision whose index is that of one of {len(scores)} "
                f"choices, got {decision!r}"
            )
        return decision


def _by_mean(scores: Sequence[ChoiceScore]) -> Decision:
    return _highest([fmean(score.logprobs) for score in scores])


def _greedily(scores: Sequence[ChoiceScore]) -> Decision:
    """Keep the choices with the most likely next token, token by token, until one is left.

    A choice without further tokens takes part with its mean. So a choice that is the beginning of another one can win
    or lose.
    """
    means = [fmean(score.logprobs) for score in scores]
    left = list(range(len(scores)))
    for i in range(max(len(score.logprobs) for score in scores)):
        column = {c: scores[c].logprobs[i] if i < len(scores[c].logprobs) else means[c] for c in left}
        best = max(column.values())
        left = [c for c in left if column[c] == best]
        if len(left) == 1:
            break
    return Decision(left[0], tuple(means))


def _by_gain(scores: Sequence[ChoiceScore]) -> Decision:
    gains = []
    for score in scores:
        if score.unconditional_logprobs is None:
            raise ValueError("unconditional_likelihood_normalized needs the unconditional log-probabilities")
        pairs = zip(score.logprobs, score.unconditional_logprobs, strict=True)
        gains.append(fmean(given - alone for given, alone in pairs))
    return _highest(gains)


def _highest(values: list[float]) -> Decision:
    return Decision(max(range(len(values)), key=values.__getitem__), tuple(values))


#: The highest mean log-probability of a choice's tokens.
token_length_normalized: Final = ChoicesMethod("token_length_normalized", _by_mean)
#: The choice with the most likely first token; among equals, the most likely second token, and so on.
greedy_token_selection: Final = ChoicesMethod("greedy_token_selection", _greedily)
#: The highest mean difference between a token's log-probabilities with and without the prompt; see the EleutherAI
#: blog's "Multiple Choice Normalization in LM Evaluation" (2021).
unconditional_likelihood_normalized: Final = ChoicesMethod(
    "unconditional_likelihood_normalized", _by_gain, unconditional=True
)

CHOICES_METHODS: Final = {
    method.name: method
    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
}
