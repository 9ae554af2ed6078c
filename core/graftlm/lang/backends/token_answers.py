"""What a server says of tokens, checked before it counts."""

import math
import reprlib
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from graftlm.errors import EngineError

__all__ = ["cached_tokens_of", "prompt_token_ids", "scored_logprobs", "tokenized"]

#: Above 0 by as much, a log-probability is one of a sure token that was rounded.
_ROUNDING: Final = 1e-3


def tokenized(answer: Any, number: int, source: str) -> list[list[int]]:
    """Return the token ids that texts are answered with.

    Args:
        answer: of /v1/tokenize.
        number: of texts.
        source: of the answer, for errors: server and route.

    Raises:
        EngineError: it is something else.
    """
    lists = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or len(lists) != number or not all(_are_token_ids(ids) for ids in lists):
        raise EngineError(
            f"{source} answered no tokens, a list of token ids for each of {number} texts, but {reprlib.repr(answer)}"
        )
    return lists


def prompt_token_ids(meta_info: dict[str, Any], source: str) -> list[int]:
    """Return the token ids of a prompt, of which all log-probabilities were asked for; raises as `tokenized`."""
    return [token_id for _, token_id in _entries(meta_info, source)]


def scored_logprobs(meta_info: dict[str, Any], num_tokens: int, start: int, source: str) -> list[float]:
    """Return [num_tokens - start], the log-probabilities of a prompt's tokens from one on.

    Args:
        meta_info: of a request whose logprob_start_len was the token before, as far as there is one; that token itself
            has no number. The prompt's first has none either, and counts as 0.
        num_tokens: of the prompt.

    Raises:
        EngineError: a token has no log-probability: a finite number that is at most 0.
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
    """Return how many tokens were reused, None where the server does not say; raises as `tokenized`."""
    number = meta_info.get("cached_tokens")
    if number is not None and not _is_count(number):
        raise EngineError(f"{source} answered no number of cached_tokens but {reprlib.repr(number)}")
    return number


def _entries(meta_info: dict[str, Any], source: str) -> Sequence[tuple[Any, int]]:
    """Return what is said of the tokens of a prompt: log-probability, yet to be checked, and token id."""
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


def _refuse(wanted: str, got: Any, source: str) -> NoReturn:
    raise EngineError(f"{source} answered input_token_logprobs that are not {wanted}: {reprlib.repr(got)}")


def _are_token_ids(values: Any) -> bool:
    return isinstance(values, list) and all(_is_count(value) for value in values)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
