"""Estimates relative times of steps, with and without drafts, by number of tokens."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepCosts"]

#: Numbers of tokens for which times are estimated; times of other numbers are interpolated.
_SIZES: Final = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 4096])
_LOG_SIZES: Final = np.log2(_SIZES)
_NUM_SIZES: Final = len(_SIZES)
#: Relative time of an additional token before any measurement. It is small, because reading the weights takes most of
#: the time of a small step.
_SLOPE: Final = 0.04
#: Maximum growth of the logarithm of the time per doubling of the tokens before any measurement, half of the largest
#: possible growth.
_MAX_GROWTH: Final = 0.35
#: Standard deviation of the growth of the logarithm of the time per doubling of the tokens. The growth is between 0,
#: where reading the weights takes all the time, and 0.69, where each token takes the same time.
_GROWTH_DEVIATION: Final = 0.3
#: Distance, in doublings, within which the growth is similar.
_GROWTH_REACH: Final = 4.0
#: Standard deviations of the logarithm of the time of a step with drafts, relative to a decode step of as many tokens:
#: common to all sizes, and of single sizes.
_DRAFTS_DEVIATION: Final = 0.2
_SIZE_DEVIATION: Final = 0.05
#: Standard deviation of the change of the logarithm of the machine's speed from step to step.
_DRIFT: Final = 0.02
#: Limits of the standard deviation of the logarithm of a single step's time, and its value before any measurement.
_NOISE: Final = (0.005, 0.5)
_FIRST_NOISE: Final = 0.1
#: Additional standard deviation of the second step of a size; that of the n-th step is 1 / (n - 1) of it.
_EARLY_NOISE: Final = 0.2
#: Weight of the latest step in the measured deviation.
_NOISE_WEIGHT: Final = 0.05
#: Degrees of freedom of the distribution of deviations (Student's t). Large deviations have a small weight, because
#: other work ran during the step.
_FREEDOM: Final = 4.0
#: Share by which estimates and their deviations return to their initial values with each step.
_RETURN: Final = 0.0003
#: Number of standard deviations above `_MIN_UNCERTAINTY` by which `optimistic` estimates are lower.
_OPTIMISM: Final = 1.0
#: Standard deviation above which a size is not tried. A size about twice as large as the measured ones is below it.
_MAX_UNCERTAINTY: Final = 0.4
#: Largest size that is tried without measurements.
_SMALL_SIZE: Final = 4
#: Standard deviation below which an estimate counts as certain.
_MIN_UNCERTAINTY: Final = 0.05
#: Number of standard deviations of the time of a decode step by which drafts must be better, unless this time is
#: certain. Otherwise a decode step is measured.
_CAUTION: Final = 2.0
_MAX_CACHED: Final = 64
#: Number of steps of the same size after which cached estimates are computed again.
_KEPT_STEPS: Final = 16


@dataclass(frozen=True, slots=True)
class _Estimates:
    """Estimates of the logarithms of times of steps with drafts, relative to a decode step of some requests.

    Attributes:
        version: version of the filter's state.
        means, deviations: float64 [sizes], the estimates and their standard deviations.
        first_unknown: number of tokens from which on a step is not tried.
        plain_deviation: standard deviation of the logarithm of the decode step's time.
    """

    version: int
    means: NDArray[np.float64]
    deviations: NDArray[np.float64]
    first_unknown: int
    plain_deviation: float


class StepCosts:
    """Measures the relative times of steps of different sizes.

    The logarithms of the times are the state of a Kalman filter: of decode steps of each size, of steps with drafts of
    each size, and the machine's present speed, which changes with its other load. Neighbouring sizes are correlated, so
    that a measurement also changes the estimates of sizes that were not measured.
    """

    def __init__(self) -> None:
        logs = _prior_logs()
        self._prior = np.concatenate((logs, logs, [0.0]))
        self._mean = self._prior.copy()
        self._prior_covariance = _prior_covariance()
        self._covariance = self._prior_covariance.copy()
        self._noise = _FIRST_NOISE**2
        self._num_steps: Counter[tuple[bool, int]] = Counter()  # kind and size -> number of steps
        self._has_speed = False
        self._latest: tuple[bool, int] | None = None
        self._num_same = 0
        self._version = 0
        self._cached: dict[int, _Estimates] = {}  # number of requests -> estimates

    def observe(self, num_tokens: int, seconds: float, *, has_drafts: bool = False) -> None:
        """Add a measured step without prefill.

        Args:
            num_tokens: number of tokens in the step, at least 1.
            seconds: device time in seconds; a device that does not measure reports 0, which is ignored.
        """
        nearest = has_drafts, int(np.searchsorted(_SIZES, num_tokens))
        num_before = self._num_steps[nearest]
        self._num_steps[nearest] += 1
        if seconds <= 0.0 or not num_before:  # the first step of a size may allocate memory or compile
            return
        value = float(np.log(seconds))
        if not self._has_speed:
            self._has_speed = True
            self._mean[-1] = value - self._prior[0]
        weights = _weights(num_tokens, has_drafts)
        self._forget()
        covered = self._covariance @ weights
        explained = float(weights @ covered)
        deviation = value - float(weights @ self._mean)
        noise = self._noise + (_EARLY_NOISE / num_before) ** 2
        weight = (_FREEDOM + 1.0) / (_FREEDOM + deviation**2 / (explained + noise))
        variance = explained + noise / min(weight, 1.0)
        if num_before > 1:
            change = max(0.0, weight * deviation**2 - explained) - self._noise
            self._noise = min(max(self._noise + _NOISE_WEIGHT * change, _NOISE[0] ** 2), _NOISE[1] ** 2)
        self._mean += covered * (deviation / variance)
        self._covariance -= np.outer(covered, covered / variance)
        self._count(has_drafts, num_tokens)

    def estimate(self, num_rows: int, max_drafts: int) -> NDArray[np.float64]:
        """Return the times of steps with 0 to `max_drafts` drafted tokens, relative to the step without drafts.

        Returns: float64 [max_drafts + 1], in non-decreasing order; the first value is 1.
        """
        return self._interpolated(num_rows, max_drafts, self._at_sizes(num_rows).means)

    def optimistic(self, num_rows: int, max_drafts: int) -> NDArray[np.float64]:
        """Return lower estimates than `estimate` where few steps were measured, so that a choice tries such steps.

        Returns: float64 [max_drafts + 1], in non-decreasing order; the first value is 1. The values are infinite from
            the second number of tokens on that is much larger than the measured ones.
        """
        found = self._at_sizes(num_rows)
        times = self._interpolated(
            num_rows, max_drafts, found.means - _OPTIMISM * np.maximum(found.deviations - _MIN_UNCERTAINTY, 0.0)
        )
        times[2:][num_rows + np.arange(2, max_drafts + 1) >= found.first_unknown] = np.inf
        return times

    def is_better(self, num_rows: int, gain: float) -> bool:
        """Return whether drafts are better than a step without drafts, although its time may be uncertain.

        Args:
            gain: number of tokens per second with drafts, relative to that without drafts, if `estimate` is right.
        """
        uncertainty = self._at_sizes(num_rows).plain_deviation
        return uncertainty < _MIN_UNCERTAINTY or gain > np.exp(_CAUTION * uncertainty)

    def _interpolated(self, num_rows: int, max_drafts: int, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        values = np.interp(np.log2(num_rows + np.arange(max_drafts + 1)), _LOG_SIZES, logs)
        values[0] = 0.0
        return np.exp(np.maximum.accumulate(values))

    def _at_sizes(self, num_rows: int) -> "_Estimates":
        """Return estimates for each size, relative to a decode step of `num_rows` requests."""
        found = self._cached.get(num_rows)
        if found is None or found.version != self._version:
            if len(self._cached) > _MAX_CACHED:
                self._cached.clear()
            found = self._cached[num_rows] = self._new_estimates(num_rows)
        return found

    def _new_estimates(self, num_rows: int) -> "_Estimates":
        plain = _weights(num_rows, False)
        weights = np.zeros((_NUM_SIZES, len(plain)))
        weights[:, _NUM_SIZES:-1] = np.eye(_NUM_SIZES)
        weights[:, -1] = 1.0
        is_large = np.greater(_SIZES, max(num_rows, _SMALL_SIZE))
        is_unknown = (self._variances(weights) > _MAX_UNCERTAINTY**2) & is_large
        unknown = _SIZES[is_unknown]
        relative = weights - plain
        return _Estimates(
            version=self._version,
            means=relative @ self._mean,
            deviations=np.sqrt(self._variances(relative)),
            first_unknown=int(unknown[0]) if len(unknown) else 1 << 30,
            plain_deviation=float(np.sqrt(self._variances(plain[None])[0])),
        )

    def _variances(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the variances of weighted sums of the state, float64 [n]; the weights are [n, state]."""
        variances: NDArray[np.float64] = ((weights @ self._covariance) * weights).sum(axis=1)
        return np.maximum(variances, 0.0)

    def _forget(self) -> None:
        """Let the machine's speed change, and estimates return towards their initial values."""
        speed = self._mean[-1]
        self._mean += _RETURN * (self._prior - self._mean)
        self._mean[-1] = speed
        self._covariance += _RETURN * (self._prior_covariance - self._covariance)
        self._covariance[-1, -1] += _DRIFT**2

    def _count(self, has_drafts: bool, num_tokens: int) -> None:
        """Count steps of the same size. Cached estimates are valid until the size changes, or for some steps."""
        self._num_same = self._num_same + 1 if self._latest == (has_drafts, num_tokens) else 0
        self._latest = has_drafts, num_tokens
        if self._num_same % _KEPT_STEPS == 0:
            self._version += 1


def _weights(num_tokens: int, has_drafts: bool) -> NDArray[np.float64]:
    """Return the weights of the filter's state in the logarithm of a step's time."""
    weights = np.zeros(2 * _NUM_SIZES + 1)
    place = float(np.interp(np.log2(num_tokens), _LOG_SIZES, np.arange(_NUM_SIZES)))
    lower, upper = int(place), min(int(place) + 1, _NUM_SIZES - 1)
    first = _NUM_SIZES if has_drafts else 0
    weights[first + lower] = 1.0 - (place - lower)
    weights[first + upper] += place - lower
    weights[-1] = 1.0
    return weights


def _prior_logs() -> NDArray[np.float64]:
    """Return the logarithms of the times before any measurement, relative to a step of one token: float64 [sizes]."""
    growth = np.diff(np.log(1.0 + _SLOPE * (_SIZES - 1)))
    return np.concatenate(([0.0], np.minimum(growth, _MAX_GROWTH * np.diff(_LOG_SIZES)).cumsum()))


def _prior_covariance() -> NDArray[np.float64]:
    """Return the covariance of the state before any measurement."""
    lengths, centers = np.diff(_LOG_SIZES), (_LOG_SIZES[1:] + _LOG_SIZES[:-1]) / 2
    growth = _GROWTH_DEVIATION**2 * np.exp(-np.abs(centers[:, None] - centers) / _GROWTH_REACH)
    sums = np.tril(np.ones((_NUM_SIZES, _NUM_SIZES - 1)), -1) * lengths
    common = sums @ growth @ sums.T + 1e-6 * np.eye(_NUM_SIZES)
    covariance = np.zeros((2 * _NUM_SIZES + 1, 2 * _NUM_SIZES + 1))
    covariance[:-1, :-1] = np.tile(common, (2, 2))
    covariance[:_NUM_SIZES, :_NUM_SIZES] += _SIZE_DEVIATION**2 * np.eye(_NUM_SIZES)
    covariance[_NUM_SIZES:-1, _NUM_SIZES:-1] += _DRAFTS_DEVIATION**2 + _SIZE_DEVIATION**2 * np.eye(_NUM_SIZES)
    covariance[-1, -1] = 1.0
    return covariance
