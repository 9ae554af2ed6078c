"""Checks and converts a server's answers about tokens."""

import math
import reprlib
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from graftlm.errors import EngineError

__all__ = ["cached_tokens_of", "prompt_token_ids", "scored_logprobs", "tokenized"]

#: A log-probability up to this value counts as 0: rounding can make the log-probability of a token with probability 1
#: positive.
_ROUNDING: Final = 1e-3


def tokenized(answer: Any, number: int, source: str) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        answer: answer of /v1/tokenize.
        number: number of texts.
        source: server and route of the answer, for errors.

    Raises:
        EngineError: the answer has another form.
    """
    lists = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or len(lists) != number or not all(_are_token_ids(ids) for ids in lists):
        raise EngineError(
            f"{source} must answer with tokens, a list of token ids for each of {number} texts; "
            f"got {reprlib.repr(answer)}"
        )
    return lists


def prompt_token_ids(meta_info: dict[str, Any], source: str) -> list[int]:
    """Return the token ids of a prompt whose log-probabilities were all requested; raises like `tokenized`."""
    return [token_id for _, token_id in _entries(meta_info, source)]


def scored_logprobs(meta_info: dict[str, Any], num_tokens: int, start: int, source: str) -> list[float]:
    """Return the log-probabilities of a prompt's tokens from index `start` on: [num_tokens - start].

    Args:
        meta_info: meta information of a request whose logprob_start_len was `start - 1`, or 0 if `start` is 0. The
            first reported token has no log-probability. If this is the prompt's first token, its log-probability counts
            as 0.
        num_tokens: number of tokens of the prompt.

    Raises:
        EngineError: a token has no log-probability (a finite number of at most 0).
    """
    first = max(start - 1, 0)
    entries = _entries(meta_info, source)
    if len(entries) != num_tokens - first:
        _refuse(f"{num_tokens - first} entries", entries, source)
    return [
        0.0 if position == 0 and logprob is None else _checked(logprob, source)
        for position, (logprob, _) in enumerate(entries[start - first :], start)
    ]


def cached_tokens_of(meta_info: dict[str, Any], source: str) -> int | None:
    """Return the number of reused tokens; None if the server does not report it; raises like `tokenized`."""
    number = meta_info.get("cached_tokens")
    if number is not None and not _is_count(number):
        raise EngineError(f"{source} must answer with a number of cached_tokens, got {reprlib.repr(number)}")
    return number


def _entries(meta_info: dict[str, Any], source: str) -> Sequence[tuple[Any, int]]:
    """Return the log-probability (not checked yet) and the token id of each reported prompt token."""
    entries = meta_info.get("input_token_logprobs")
    if not isinstance(entries, list) or not all(
        isinstance(e, list) and len(e) > 1 and _is_count(e[1]) for e in entries
    ):
        _refuse("a list of [log-probability, token id, ...]", entries, source)
    return [(entry[0], entry[1]) for entry in entries]


def _checked(logprob: Any, source: str) -> float:
    is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
    if not is_number or not math.isfinite(logprob) or logprob > _ROUNDING:
        _refuse("a finite number of at most 0 for each scored token", logprob, source)
    return min(float(logprob), 0.0)


def _refuse(expected: str, got: Any, source: str) -> NoReturn:
    raise EngineError(f"{source} answered input_token_logprobs that are not {expected}: {reprlib.repr(got)}")


def _are_token_ids(values: Any) -> bool:
    return isinstance(values, list) and all(_is_count(value) for value in values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
