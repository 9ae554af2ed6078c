"""The token masks of one step's requests with a grammar."""

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
        grammars: one grammar per row that samples under a grammar; None if the row's sample will not be used.
        num_words: ceil(V / 32).

    Returns: int32 [len(grammars), num_words], and a mapping index -> reason why that request cannot continue. Rows
        without a grammar, or that cannot continue, allow any token.
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
    """Return the masks of all samples, int32 [M, W]: for each request its first mask, then the masks after its drafts.

    Args:
        bits: int32 [m, W], the first mask of each of m requests.
        is_first: bool [M], whether each sample is the first of its request.
        drafted: the masks after each request's drafts; None if its samples are no longer used, so any token is allowed.
    """
    whole = np.full((len(is_first), bits.shape[1]), _ANY, dtype=np.int32)
    whole[is_first] = bits
    (starts,) = is_first.nonzero()
    for start, masks in zip(starts.tolist(), drafted, strict=True):
        if masks is not None:
            whole[start + 1 : start + 1 + len(masks)] = masks
    return whole


def _fill_together(
    fill: FillBitmasks, grammars: Sequence[RequestGrammar | None], idx: list[int], bits: NDArray[np.int32]
) -> dict[int, RequestError]:
    """Fill rows of one backend; if this fails, fill them one by one to find the request that causes the failure."""
    target = bits if len(idx) == len(bits) else np.empty((len(idx), bits.shape[1]), dtype=np.int32)
    try:
        fill([grammar.matcher for grammar in map(grammars.__getitem__, idx) if grammar is not None], target)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a plugin's code, or a Rust panic; filling one by one finds the request and the reason
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
