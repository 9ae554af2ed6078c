"""Filters on what may be sampled: top-k, top-p and min-p.

Each finds, for each row, the bound that a token must reach to stay. Tokens exactly as likely as the last one that stays
therefore stay with it, and no result depends on how a sort orders equals. (Logits in bfloat16 have many equals.)

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

__all__ = ["keep_min_p", "keep_top_k", "keep_top_p", "top_p_bounds", "top_p_bounds_on_host"]

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
    k = top_k[asking]
    largest = take_rows(logits, asking).topk(int(k.max()), dim=1).values
    bounds = largest.gather(1, to_device(k - 1, logits.device)[:, None]).squeeze(1)
    return _keep_from(logits, asking, bounds, otherwise=-torch.inf)


def keep_top_p(probs: Tensor, top_p: NDArray[np.float64]) -> Tensor:
    """Set to 0 all but each row's smallest set of tokens that holds the share p of its probability.

    Args:
        probs: float32 [n, V], not negative; not changed.
        top_p: float64 [n]; 1 keeps all.
    """
    asking = np.flatnonzero(top_p < 1.0)
    if len(asking) == 0:
        return probs
    asked, shares = take_rows(probs, asking), top_p[asking]
    if probs.device.type == "cpu":
        bounds = torch.from_numpy(top_p_bounds_on_host(asked.numpy(), shares))
    else:
        bounds = top_p_bounds(asked, to_device(shares, probs.device))
    return _keep_from(probs, asking, bounds, otherwise=0.0)


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


def top_p_bounds(probs: Tensor, top_p: Tensor) -> Tensor:
    """Return the probability of each row's last token that stays, float32 [n], by a full sort."""
    ordered = probs.sort(dim=1, descending=True).values
    sums = ordered.double().cumsum(dim=1)
    last = (sums < top_p[:, None] * sums[:, -1:]).sum(dim=1).clamp(max=probs.shape[1] - 1)
    return ordered.gather(1, last[:, None]).squeeze(1)


def top_p_bounds_on_host(probs: NDArray[np.float32], top_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """The same on the host, which may look first and sort only the likeliest tokens."""
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
