"""When requests of an open loop arrive."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["arrival_times"]


def arrival_times(
    num_requests: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draw arrivals, the first at 0.

    Gaps are gamma distributed with mean 1 / request_rate and a coefficient of variation of 1 / sqrt(burstiness): 1 is a
    Poisson process, less comes in bursts, much more comes at regular intervals. They are then scaled to that mean: what
    is offered is what was asked for, by however few requests.

    Args:
        request_rate: per second.

    Returns: seconds since the start, float64 [num_requests], ascending.
    """
    num_gaps = max(0, num_requests - 1)
    gaps = rng.gamma(burstiness, size=num_gaps)
    total = gaps.sum()
    if total > 0:  # gaps of an extreme burstiness may all round to nothing
        gaps *= num_gaps / request_rate / total
    return np.concatenate(([0.0], np.cumsum(gaps)))[:num_requests]
