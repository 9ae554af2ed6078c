"""Estimates relative times of steps, with and without drafts, by number of tokens."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepCosts"]

#: Numbers of tokens for which times are stored; times of other numbers are interpolated.
_SIZES: Final = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096])
_LOG_SIZES: Final = np.log2(_SIZES)
#: Relative time of an additional token before any measurement. It is small, because reading the weights takes most of
#: the time of a small step.
_SLOPE: Final = 0.04
#: Share of a measured deviation by which a time is corrected.
_CORRECTION: Final = 0.2
#: Share by which all times return to their initial values after a step that differs in size or kind from the previous
#: step. Otherwise, if one time was measured too long, steps of this size would never be tried again.
_RETURN: Final = 0.0005
#: Maximum deviation of the logarithm of a time. A larger deviation means that other work ran during the step.
_MAX_DEVIATION: Final = 0.7
#: Weight of the latest step in the average time of consecutive steps of one size.
_WEIGHT: Final = 0.3
#: Base-2 logarithm of the factor within which neighbouring sizes are corrected too.
_REACH: Final = 0.4


class StepCosts:
    """Measures the relative times of steps of different sizes.

    The speed of a machine depends on its other load. Therefore a step is compared only with the steps directly before
    it, and only ratios of times are stored.
    """

    def __init__(self) -> None:
        prior = np.log(1.0 + _SLOPE * (_SIZES - 1))
        self._prior = np.stack((prior, prior))
        self._log_times = self._prior.copy()  # row 0: decode steps; row 1: steps with drafts
        self._latest: tuple[int, int, float] | None = None  # kind, tokens, average seconds

    def observe(self, num_tokens: int, seconds: float, *, has_drafts: bool = False) -> None:
        """Add a measured step without prefill.

        Args:
            num_tokens: number of tokens in the step, at least 1.
            seconds: device time in seconds; a device that does not measure reports 0, which is ignored.
        """
        if seconds <= 0.0:
            return
        kind, latest = int(has_drafts), self._latest
        if latest is None or latest[:2] == (kind, num_tokens):
            mean = seconds if latest is None else latest[2] + _WEIGHT * (min(seconds, 2 * latest[2]) - latest[2])
            self._latest = kind, num_tokens, mean
            return
        old_kind, old_tokens, old_seconds = latest
        expected = self._log_time(kind, num_tokens) - self._log_time(old_kind, old_tokens)
        deviation = float(np.clip(np.log(seconds / old_seconds) - expected, -_MAX_DEVIATION, _MAX_DEVIATION))
        self._log_times += _RETURN * (self._prior - self._log_times)
        self._correct(kind, num_tokens, _CORRECTION * deviation)
        self._correct(old_kind, old_tokens, -_CORRECTION * deviation)
        self._latest = kind, num_tokens, seconds

    def estimate(self, num_rows: int, max_drafts: int) -> NDArray[np.float64]:
        """Return the times of steps with 0 to `max_drafts` drafted tokens, relative to the step without drafts.

        Returns: float64 [max_drafts + 1], in non-decreasing order; the first value is 1.
        """
        sizes = np.log2(num_rows + np.arange(max_drafts + 1))
        times = np.interp(sizes, _LOG_SIZES, self._log_times[1])
        times[0] = self._log_time(0, num_rows)
        relative: NDArray[np.float64] = np.maximum.accumulate(np.exp(times - times[0]))
        return relative

    def _log_time(self, kind: int, num_tokens: int) -> float:
        return float(np.interp(np.log2(num_tokens), _LOG_SIZES, self._log_times[kind]))

    def _correct(self, kind: int, num_tokens: int, amount: float) -> None:
        distance = (_LOG_SIZES - np.log2(num_tokens)) / _REACH
        self._log_times[kind] += amount * np.exp(-(distance**2))
