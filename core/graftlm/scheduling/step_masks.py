"""Fills the token masks of a step's requests with a grammar."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import RequestError
from graftlm.scheduling.grammar import FillBitmasks, RequestGrammar, check_allowed

__all__ = ["fill_masks", "insert_masks"]

_ANY = np.int32(-1)


def fill_masks(
    grammars: Sequence[RequestGrammar | None], num_words: int
) -> tuple[NDArray[np.int32], dict[int, RequestError]]:
    """Fill a step's bitmasks, with one call per backend.

    Args:
        grammars: the grammar of each request that samples under a grammar; None if the sample will not be used.
        num_words: ceil(V / 32).

    Returns: the masks, int32 [len(grammars), num_words], and a mapping index -> error of a request that cannot
        continue. The mask allows all tokens if the grammar is None or the request cannot continue.
    """
    bits = np.empty((len(grammars), num_words), dtype=np.int32)
    by_fill: dict[FillBitmasks, list[int]] = {}
    for i, grammar in enumerate(grammars):
        if grammar is None:
            bits[i] = _ANY
        else:
            by_fill.setdefault(grammar.fill_bitmasks, []).append(i)
    errors: dict[int, RequestError] = {}
    for fill, idx in by_fill.items():
        errors |= _fill_together(fill, grammars, idx, bits)
    for i in np.flatnonzero(~bits.any(axis=1)).tolist():
        try:
            check_allowed(bits[i])
        except RequestError as error:
            errors.setdefault(i, error)
    for i in errors:
        bits[i] = _ANY
    return bits, errors


def insert_masks(
    bits: NDArray[np.int32], is_first: NDArray[np.bool_], drafted: Sequence[NDArray[np.int32] | None]
) -> NDArray[np.int32]:
    """Return the masks of all samples, int32 [M, W].

    Args:
        bits: int32 [m, W], the first mask of each of m requests; those of requests with drafts have no meaning.
        is_first: bool [M], whether each sample is the first of its request.
        drafted: the masks of each request's samples if it has drafts; None if it has none, or if its samples are no
            longer used.
    """
    whole = np.full((len(is_first), bits.shape[1]), _ANY, dtype=np.int32)
    whole[is_first] = bits
    (starts,) = is_first.nonzero()
    for start, masks in zip(starts.tolist(), drafted, strict=True):
        if masks is not None:
            whole[start : start + len(masks)] = masks
    return whole


def _fill_together(
    fill: FillBitmasks, grammars: Sequence[RequestGrammar | None], idx: list[int], bits: NDArray[np.int32]
) -> dict[int, RequestError]:
    """Fill the masks of one backend in one call; if it fails, fill them one by one to find the failing request."""
    target = bits if len(idx) == len(bits) else np.empty((len(idx), bits.shape[1]), dtype=np.int32)
    try:
        fill([grammar.matcher for grammar in map(grammars.__getitem__, idx) if grammar is not None], target)
    except KeyboardInterrupt:
        raise
    except BaseException:  # any error of a plugin, including a Rust panic; the calls one by one report it
        return _fill_singly(grammars, idx, bits)
    if target is not bits:
        bits[idx] = target
    return {}


def _fill_singly(
    grammars: Sequence[RequestGrammar | None], idx: list[int], bits: NDArray[np.int32]
) -> dict[int, RequestError]:
    errors: dict[int, RequestError] = {}
    for i in idx:
        grammar = grammars[i]
        if grammar is None:
            continue
        try:
            grammar.fill(bits[i])
        except RequestError as error:
            errors[i] = error
    return errors
