"""The measured time of a decode step as a function of its number of tokens."""

from bisect import bisect_left
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepCosts"]

#: Numbers of tokens whose steps are averaged together, up to and including each.
_SIZES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 128, 256, 512, 1024, 2048)
#: Weight of the latest measurement.
_WEIGHT: Final = 0.2
#: A step longer than this multiple of the average counts as one of this length: something else ran.
_MAX_RATIO: Final = 2.0
#: Relative cost of a further token, as long as no larger step has been measured. Small steps are limited by reading the
#: weights, so that further tokens cost little.
_SLOPE: Final = 0.04


class StepCosts:
    """Averages the times of steps without prefill, and interpolates between the sizes that have been measured."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}  # by index in _SIZES
        self._known: tuple[list[float], list[float]] | None = None  # sizes and times, ascending; None: build anew

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step.

        Args:
            num_tokens: of the step, at least 1.
            seconds: device time; a device that measures none reports 0, which is ignored.
        """
        if seconds <= 0.0:
            return
        idx = min(bisect_left(_SIZES, num_tokens), len(_SIZES) - 1)
        mean = self._seconds.get(idx)
        if mean is None:
            self._seconds[idx] = seconds
        else:
            self._seconds[idx] = mean + _WEIGHT * (min(seconds, _MAX_RATIO * mean) - mean)
        self._known = None

    def estimate(self, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the expected times of steps, float64 [n] in seconds; they never decrease with the number of tokens.

        Args:
            num_tokens: int64 [n], ascending, at least 1.
        """
        if not self._seconds:
            return 1.0 + _SLOPE * (num_tokens - 1).astype(np.float64)
        if self._known is None:
            idx = sorted(self._seconds)
            self._known = [float(_SIZES[i]) for i in idx], [self._seconds[i] for i in idx]
        sizes, seconds = self._known
        found = np.interp(num_tokens, sizes, seconds)
        beyond = np.maximum(num_tokens - sizes[-1], 0.0) * _SLOPE * seconds[-1] / max(1.0, sizes[-1] * _SLOPE)
        below = np.maximum(sizes[0] - num_tokens, 0.0) * _SLOPE * seconds[0] / (1.0 + _SLOPE * sizes[0])
        seconds_of: NDArray[np.float64] = np.maximum.accumulate(found + beyond - below)
        return seconds_of
