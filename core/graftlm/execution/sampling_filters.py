"""The sampling filters top-k, top-p and min-p.

Each filter computes one bound per row, and keeps the tokens that reach the bound. All tokens with the probability of
the last kept token are therefore also kept, and the result does not depend on how a sort orders equal numbers, which
are frequent in bfloat16 logits. On a GPU, a kernel searches for the bound without sorting.

The settings are host arrays. Filters therefore run only for the rows that have them, and do not wait for the device.
Rows with NaN stay NaN or become empty; other rows are not affected.
"""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device
from graftlm.execution.device_rows import put_rows, take_rows

__all__ = ["keep_min_p", "keep_top_k", "keep_top_p", "top_p_bounds_on_host"]

#: On the host, top-p sorts only the tokens whose probability is above a share of the largest probability. The shares
#: are tried in this order, until the sum of these tokens is large enough.
_CANDIDATE_SHARES: Final = (2.0**-6, 2.0**-12, 2.0**-18, 0.0)


def keep_top_k(logits: Tensor, top_k: NDArray[np.int64]) -> Tensor:
    """Set all but each row's k largest logits to -inf.

    Args:
        logits: float32 [n, V]; not changed.
        top_k: int64 [n]; with V or more, all tokens are kept.
    """
    filtered = np.flatnonzero(top_k < logits.shape[1])
    if len(filtered) == 0:
        return logits
    return _keep_from(
        logits, filtered, _kth_largest(take_rows(logits, filtered), top_k[filtered]), otherwise=-torch.inf
    )


def keep_top_p(probs: Tensor, top_p: NDArray[np.float64]) -> Tensor:
    """Keep each row's smallest set of most likely tokens whose sum is at least top_p; set other tokens to 0.

    Args:
        probs: float32 [n, V], not negative; not changed.
        top_p: float64 [n], a share of the row's sum; with 1, all tokens are kept.
    """
    filtered = np.flatnonzero(top_p < 1.0)
    if len(filtered) == 0:
        return probs
    return _keep_from(probs, filtered, _top_p_bounds(take_rows(probs, filtered), top_p[filtered]), otherwise=0.0)


def keep_min_p(probs: Tensor, min_p: NDArray[np.float64]) -> Tensor:
    """Set all probabilities below min_p times the row's largest probability to 0.

    Args:
        probs: float32 [n, V], not negative; not changed.
        min_p: float64 [n]; with 0, all tokens are kept.
    """
    filtered = np.flatnonzero(min_p > 0.0)
    if len(filtered) == 0:
        return probs
    shares = to_device(min_p[filtered].astype(np.float32), probs.device)
    return _keep_from(probs, filtered, take_rows(probs, filtered).amax(dim=1) * shares, otherwise=0.0)


def _keep_from(x: Tensor, rows: NDArray[Any], bounds: Tensor, otherwise: float) -> Tensor:
    """Replace numbers below the bound of their row by `otherwise`. Only `rows` have bounds."""
    bounds = put_rows(x.new_full((len(x),), -torch.inf), rows, bounds)
    return x.masked_fill(x < bounds[:, None], otherwise)


def _kth_largest(logits: Tensor, k: NDArray[np.int64]) -> Tensor:
    """Return each row's k-th largest logit, float32 [n]."""
    if logits.device.type == "cpu":
        return logits.topk(int(k.max()), dim=1).values.gather(1, torch.from_numpy(k - 1)[:, None]).squeeze(1)
    from graftlm.execution.bound_kernel import kth_largest

    return kth_largest(logits, to_device(k.astype(np.float64), logits.device))


def _top_p_bounds(probs: Tensor, top_p: NDArray[np.float64]) -> Tensor:
    """Return the lowest probability that each row keeps, float32 [n]."""
    if probs.device.type == "cpu":
        return torch.from_numpy(top_p_bounds_on_host(probs.numpy(), top_p))
    from graftlm.execution.bound_kernel import top_p_bounds

    return top_p_bounds(probs, to_device(top_p, probs.device))


def top_p_bounds_on_host(probs: NDArray[np.float32], top_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """Compute `_top_p_bounds` on the host, by sorting only the most likely tokens."""
    return np.array([_top_p_bound(row, share) for row, share in zip(probs, top_p, strict=True)], dtype=np.float32)


def _top_p_bound(probs: NDArray[np.float32], top_p: float) -> float:
    largest = probs.max()
    if not largest > 0.0:
        return 0.0  # the row contains NaN
    wanted = top_p * probs.sum(dtype=np.float64)
    for share in _CANDIDATE_SHARES:
        candidates = probs[probs >= largest * np.float32(share)]
        if candidates.sum(dtype=np.float64) >= wanted:
            break
    ordered = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), wanted))
    return float(ordered[min(last, len(ordered) - 1)])
