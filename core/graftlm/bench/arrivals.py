"""The arrival times of requests in an open loop."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["arrival_times"]


def arrival_times(
    num_requests: int, request_rate: float, burstiness: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return random arrival times; the first one is 0.

    The gaps between arrivals have a gamma distribution with mean 1 / request_rate and coefficient of variation
    1 / sqrt(burstiness). A burstiness of 1 gives a Poisson process; smaller values give bursts; much larger values give
    regular intervals. The gaps are then scaled, so that their mean is exact even for few requests.

    Args:
        request_rate: requests per second.

    Returns: seconds since the start, float64 [num_requests], ascending.
    """
    num_gaps = max(0, num_requests - 1)
    gaps = rng.gamma(burstiness, size=num_gaps)
    total = gaps.sum()
    if total > 0:  # with an extreme burstiness, all gaps may be rounded to 0
        gaps *= num_gaps / request_rate / total
    return np.concatenate(([0.0], np.cumsum(gaps)))[:num_requests]
