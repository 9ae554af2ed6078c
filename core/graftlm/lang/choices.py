"""Methods by which `select` picks a choice, given the log-probabilities of all choices' tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from graftlm.errors import RequestError

__all__ = [
    "CHOICES_METHODS",
    "CallableMethod",
    "ChoiceScore",
    "ChoicesDecision",
    "ChoicesMethod",
    "Decision",
    "Selection",
    "greedy_token_selection",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
]

#: The tokens of a text in SGLang's form: [log-probability, token id, text] for each token.
Entries = Sequence[Sequence[Any]]


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

    A `ChoicesMethod` returns it from `decide`.

    Attributes:
        index: index of the selected choice.
        scores: [choices], one score for each choice. The choice with the highest score is selected, except by methods
            that compare token by token.
    """

    index: int
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The result of a call of a choices method, under SGLang's names.

    Attributes:
        decision: the selected choice.
        meta_info: the meta information that `s.get_meta_info(name)` returns.
    """

    decision: str
    meta_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice that a `select` appends.

    Attributes:
        index: index of the choice.
        meta_info: the meta information that `s.get_meta_info(name)` returns.
    """

    index: int
    meta_info: dict[str, Any]


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

    def select(self, choices: Sequence[str], scores: Sequence[ChoiceScore]) -> Selection:
        """Return the selected choice with its meta information; raises like `take`."""
        decision = self.take(scores)
        meta_info = _meta_info(self, choices, scores) | {"normalized_prompt_logprobs": list(decision.scores)}
        return Selection(decision.index, meta_info)

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """SGLang's name of `unconditional`."""
        return self.unconditional

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Entries],
        output_token_logprobs: Sequence[Entries] = (),
        unconditional_token_logprobs: Sequence[Entries] | None = None,
    ) -> ChoicesDecision:
        """Select a choice by log-probabilities in SGLang's form: [log-probability, token id, text] for each token.

        Raises:
            RequestError: the method needs the unconditional log-probabilities, or its result is wrong (see `take`).
        """
        if self.unconditional and unconditional_token_logprobs is None:
            raise RequestError(f"choices_method {self.name!r} needs unconditional_token_logprobs")
        alone: Sequence[Entries | None] = unconditional_token_logprobs or [None] * len(choices)
        decision = self.take([_score(own, other) for own, other in zip(input_token_logprobs, alone, strict=True)])
        meta_info = {
            "normalized_prompt_logprobs": list(normalized_prompt_logprobs),
            "input_token_logprobs": list(input_token_logprobs),
            "output_token_logprobs": list(output_token_logprobs),
        }
        return ChoicesDecision(choices[decision.index], meta_info)


@dataclass(frozen=True, slots=True)
class CallableMethod:
    """A choices method in SGLang's form: an object that is called with keyword arguments.

    The object gets `choices`, `normalized_prompt_logprobs`, `input_token_logprobs`, `output_token_logprobs` (empty
    lists) and `unconditional_token_logprobs`. The last argument is None, unless the object's attribute
    `requires_unconditional_logprobs` is true. The result has the attributes `decision`, the selected choice, and
    `meta_info`.
    """

    call: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name of the function or of the object's class."""
        return str(getattr(self.call, "__name__", type(self.call).__name__))

    @property
    def unconditional(self) -> bool:
        """Whether the method needs the unconditional log-probabilities."""
        return bool(getattr(self.call, "requires_unconditional_logprobs", False))

    def select(self, choices: Sequence[str], scores: Sequence[ChoiceScore]) -> Selection:
        """Return the selected choice with its meta information.

        Raises:
            RequestError: the result has no `decision` that is one of the choices.
        """
        meta_info = _meta_info(self, choices, scores)
        decided = self.call(
            choices=list(choices),
            normalized_prompt_logprobs=meta_info["normalized_prompt_logprobs"],
            input_token_logprobs=meta_info["input_token_logprobs"],
            output_token_logprobs=[[] for _ in choices],
            unconditional_token_logprobs=meta_info.get("unconditional_token_logprobs"),
        )
        decision = getattr(decided, "decision", None)
        if not isinstance(decision, str) or decision not in choices:
            raise RequestError(
                f"choices_method {self.name} must return an object whose decision is one of {list(choices)!r:.200}, "
                f"got {decided!r:.200}"
            )
        return Selection(list(choices).index(decision), meta_info | (getattr(decided, "meta_info", None) or {}))


def _meta_info(
    method: ChoicesMethod | CallableMethod, choices: Sequence[str], scores: Sequence[ChoiceScore]
) -> dict[str, Any]:
    meta_info: dict[str, Any] = {
        "choices": list(choices),
        "choices_method": method.name,
        "normalized_prompt_logprobs": [fmean(score.logprobs) for score in scores],
        "input_token_logprobs": [_entries(score.logprobs, score.token_ids) for score in scores],
        "cached_tokens": [score.cached_tokens for score in scores],
    }
    if method.unconditional:
        meta_info["unconditional_token_logprobs"] = [
            _entries(score.unconditional_logprobs or (), score.token_ids) for score in scores
        ]
    return meta_info


def _entries(logprobs: Iterable[float], token_ids: Iterable[int]) -> list[list[Any]]:
    """Return [log-probability, token id, None] for each token, the form of SGLang's `meta_info`."""
    return [[logprob, token_id, None] for logprob, token_id in zip(logprobs, token_ids, strict=True)]


def _score(entries: Entries, unconditional: Entries | None) -> ChoiceScore:
    """Return the ChoiceScore for a choice's entries in SGLang's form; a missing log-probability counts as 0."""
    return ChoiceScore(
        tuple([int(entry[1]) for entry in entries]),
        tuple([float(entry[0] or 0.0) for entry in entries]),
        None if unconditional is None else tuple([float(entry[0] or 0.0) for entry in unconditional]),
    )


def _by_mean(scores: Sequence[ChoiceScore]) -> Decision:
    return _highest([fmean(score.logprobs) for score in scores])


def _greedily(scores: Sequence[ChoiceScore]) -> Decision:
    """Compare the choices token by token, and keep those with the most likely next token, until one is left.

    A choice without further tokens is compared by its mean. So if one choice is the beginning of another, either of the
    two can be selected.
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
#: The choice with the most likely first token; if several have it, the one with the most likely second token; and so
#: on.
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
