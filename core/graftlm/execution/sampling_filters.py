"""Filters on what may be sampled: top-k, top-p and min-p.

Each finds, for each row, the bound that a token must reach to stay. Tokens exactly as likely as the last one that stays
therefore stay with it, and no result depends on how a sort orders equals. (Logits in bfloat16 have many equals.) On a
device nothing is sorted: a kernel searches for the bound.

The settings are host arrays, so rows that ask for nothing cost nothing and the device is never waited for. Rows with
NaN stay NaN or become empty; other rows are unaffected.
"""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device
from graftlm.execution.device_rows import put_rows, take_rows

__all__ = ["keep_min_p", "keep_top_k", "keep_top_p", "top_p_bounds_on_host"]

#: Shares of the largest probability above which the host looks for the tokens of top-p, until they hold enough.
_FIRST_LOOKS: Final = (2.0**-6, 2.0**-12, 2.0**-18, 0.0)


def keep_top_k(logits: Tensor, top_k: NDArray[np.int64]) -> Tensor:
    """Set all but each row's k largest logits to -inf.

    Args:
        logits: float32 [n, V]; not changed.
        top_k: int64 [n]; V or more keeps all.
    """
    asking = np.flatnonzero(top_k < logits.shape[1])
    if len(asking) == 0:
        return logits
    return _keep_from(logits, asking, _kth_largest(take_rows(logits, asking), top_k[asking]), otherwise=-torch.inf)


def keep_top_p(probs: Tensor, top_p: NDArray[np.float64]) -> Tensor:
    """Set to 0 all but each row's smallest set of tokens that holds the share p of its probability.

    Args:
        probs: float32 [n, V], not negative; not changed.
        top_p: float64 [n]; 1 keeps all.
    """
    asking = np.flatnonzero(top_p < 1.0)
    if len(asking) == 0:
        return probs
    return _keep_from(probs, asking, _top_p_bounds(take_rows(probs, asking), top_p[asking]), otherwise=0.0)


def keep_min_p(probs: Tensor, min_p: NDArray[np.float64]) -> Tensor:
    """Set to 0 all tokens less likely than the share p of each row's most likely one.

    Args:
        probs: float32 [n, V], not negative; not changed.
        min_p: float64 [n]; 0 keeps all.
    """
    asking = np.flatnonzero(min_p > 0.0)
    if len(asking) == 0:
        return probs
    shares = to_device(min_p[asking].astype(np.float32), probs.device)
    return _keep_from(probs, asking, take_rows(probs, asking).amax(dim=1) * shares, otherwise=0.0)


def _keep_from(x: Tensor, rows: NDArray[Any], bounds: Tensor, otherwise: float) -> Tensor:
    """Replace what lies below its row's bound; rows not listed have none."""
    bounds = put_rows(x.new_full((len(x),), -torch.inf), rows, bounds)
    return x.masked_fill(x < bounds[:, None], otherwise)


def _kth_largest(logits: Tensor, k: NDArray[np.int64]) -> Tensor:
    """Return each row's k-th largest logit, float32 [n]."""
    if logits.device.type == "cpu":
        return logits.topk(int(k.max()), dim=1).values.gather(1, torch.from_numpy(k - 1)[:, None]).squeeze(1)
    from graftlm.execution.bound_kernel import kth_largest

    return kth_largest(logits, to_device(k.astype(np.float64), logits.device))


def _top_p_bounds(probs: Tensor, top_p: NDArray[np.float64]) -> Tensor:
    """Return the probability of each row's last token that stays, float32 [n]."""
    if probs.device.type == "cpu":
        return torch.from_numpy(top_p_bounds_on_host(probs.numpy(), top_p))
    from graftlm.execution.bound_kernel import top_p_bounds

    return top_p_bounds(probs, to_device(top_p, probs.device))


def top_p_bounds_on_host(probs: NDArray[np.float32], top_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """Do `_top_p_bounds` on the host, which looks first and sorts only the likeliest tokens."""
    return np.array([_top_p_bound(row, share) for row, share in zip(probs, top_p, strict=True)], dtype=np.float32)


def _top_p_bound(probs: NDArray[np.float32], top_p: float) -> float:
    largest = probs.max()
    if not largest > 0.0:
        return 0.0  # the row is NaN
    wanted = top_p * probs.sum(dtype=np.float64)
    for look in _FIRST_LOOKS:
        candidates = probs[probs >= largest * np.float32(look)]
        if candidates.sum(dtype=np.float64) >= wanted:
            break
    ordered = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(ordered, dtype=np.float64), wanted))
    return float(ordered[min(last, len(ordered) - 1)])
