"""The fields that requests and answers of chat and completion endpoints have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final

from graftlm.errors import EngineError, UnsupportedFeatureError
from graftlm.lang.sampling import DTYPE_PATTERNS, Sampling

__all__ = [
    "DEFAULT_MAX_TOKENS",
    "CallTokens",
    "call_tokens",
    "choices_of",
    "common_fields",
    "finish_reason",
    "max_tokens_of",
    "tokens_of_each",
]

#: The limit of a `gen` without `max_tokens`. It equals that of engines and servers; endpoints have various defaults.
DEFAULT_MAX_TOKENS: Final = 128

#: Fields of `Sampling` that a request body has under the same name, and fields that other code writes into the body.
_SAME: Final = ("n", "temperature", "top_p", "frequency_penalty", "presence_penalty")
_ELSEWHERE: Final = ("max_tokens", "stop", "return_logprob", "top_logprobs_num", "return_text_in_logprobs")

#: Field that endpoints may lack -> the value that has no effect and is therefore accepted.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "top_k": -1, "min_p": 0.0, "min_tokens": 0, "ignore_eos": False, "logprob_start_len": -1, "stop_token_ids": (),
    "stop_regex": (), "n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "return_logprob": False,
    "top_logprobs_num": 0, "return_text_in_logprobs": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallTokens:
    """The token counts of one call."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


def common_fields(
    sampling: Sampling,
    *,
    taken: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
    lacking: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the fields of a body that both kinds of endpoints have.

    Args:
        taken: further fields of Sampling that the caller writes into the body.
        added: fields that this endpoint has under the same name, although other endpoints lack them.
        lacking: fields that this endpoint does not have, although other endpoints do.

    Raises:
        UnsupportedFeatureError: a parameter is set that such endpoints do not support.
    """
    given = sampling.given()
    known = {*_SAME, *_ELSEWHERE, *taken, *added} - {*lacking}
    refused = [name for name in given if name not in known and given[name] != _NEUTRAL.get(name)]
    if refused:
        is_dtype = sampling.regex in DTYPE_PATTERNS.values()  # a dtype has been replaced by its pattern
        names = ["dtype" if name == "regex" and is_dtype else name for name in refused]
        raise UnsupportedFeatureError(
            f"{', '.join(names)}: this endpoint has no such field; leave it out, or run the program on an Engine or "
            "a RuntimeEndpoint"
        )
    fields: dict[str, Any] = {name: given[name] for name in _SAME if name in given and name not in lacking}
    fields |= {name: given[name] for name in added if name in given and given[name] != _NEUTRAL.get(name)}
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


def choices_of(answer: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer, or of a stream's event, in order.

    Raises:
        EngineError: the answer has no list of choices.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise EngineError(f"the endpoint must answer with choices, got {answer!r:.200}; check base_url")
    return sorted(choices, key=lambda choice: int(choice.get("index") or 0))


def call_tokens(answer: Mapping[str, Any]) -> CallTokens:
    """Return the token counts of an answer; a count that the endpoint does not report is 0."""
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    counts = (usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))
    return CallTokens(*[int(count or 0) for count in counts])


def max_tokens_of(sampling: Sampling) -> int:
    """Return the maximum number of tokens of a completion."""
    return DEFAULT_MAX_TOKENS if sampling.max_tokens is None else sampling.max_tokens


def tokens_of_each(total: int, num_letters: Sequence[int], known: Sequence[int | None]) -> list[int]:
    """Return the number of tokens of each completion if an answer only reports their sum.

    Args:
        total: the sum.
        num_letters: length of each completion. Completions with an unknown number of tokens share the rest of the sum
            in proportion to their lengths.
        known: number of tokens of each completion; None if it is unknown.
    """
    left = total - sum(number or 0 for number in known)
    if left < 0 or (left and None not in known):  # the known numbers contradict the sum
        left, known = total, [None] * len(known)
    letters = [length if number is None else 0 for length, number in zip(num_letters, known, strict=True)]
    every = max(sum(letters), 1)
    ends = [(2 * left * upto + every) // (2 * every) for upto in accumulate(letters, initial=0)]  # rounded
    shares = [end - start for start, end in pairwise(ends)]
    return [share if number is None else number for share, number in zip(shares, known, strict=True)]


def finish_reason(choice: Mapping[str, Any], num_tokens: int) -> dict[str, Any] | None:
    """Return why a completion ended, in SGLang's form; None if it has not ended."""
    match choice.get("finish_reason"):
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": choice.get("matched_stop")}
        case reason:
            return {"type": reason, "length": num_tokens}
