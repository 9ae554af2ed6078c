"""Chooses the number of drafted tokens that maximises the expected number of tokens per second."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.speculation.step_costs import StepCosts

__all__ = ["DraftBudget"]

#: Minimum expected gain in tokens per second for which tokens are drafted; the estimates are not more exact.
_MIN_GAIN: Final = 1.03
#: Number of calls after which cached estimates are computed again.
_KEPT_STEPS: Final = 64


class DraftBudget:
    """Chooses the lengths of the drafts of one step.

    A step of B requests yields B tokens without drafts. A drafted token adds its acceptance probability to this number,
    and makes the step longer. The probability falls with the position in the draft. The tokens with the highest
    probabilities are verified, up to the number with the highest expected tokens per second.

    Args:
        costs: relative times of steps by number of tokens.
        max_drafts: maximum length of a draft in tokens.
    """

    def __init__(self, costs: StepCosts, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._costs = costs
        self._times: dict[tuple[int, int], NDArray[np.float64]] = {}  # arguments -> cached estimate
        self._num_asked = 0

    def lengths(self, num_rows: int, probabilities: Sequence[float], limits: Sequence[int]) -> list[int]:
        """Return, for each of m drafts, the number of tokens to verify.

        Args:
            num_rows: number of requests that decode in the step, at least m.
            probabilities: for each draft, the probability that a token is accepted if all tokens before it are.
            limits: number of tokens in each draft.
        """
        max_len = max(limits, default=0)
        times = self._relative_times(num_rows, sum(limits))
        # An upper bound of the accepted tokens, as if drafts were endless. It already excludes drafts in most steps.
        most = sum(min(p / (1.0 - p), max_len) if p < 1.0 else max_len for p in probabilities)
        if len(times) < 2 or num_rows + most < _MIN_GAIN * num_rows * times[1]:
            return [0] * len(limits)
        places = np.arange(1, max_len + 1)
        survival = np.asarray(probabilities, dtype=np.float64)[:, None] ** places
        survival[places > np.asarray(limits)[:, None]] = 0.0
        flat = survival.ravel()
        order = np.argsort(-flat, kind="stable")
        order = order[: np.count_nonzero(flat)]
        num_taken = self._best(num_rows, flat[order])
        lengths = np.bincount(order[:num_taken] // max_len, minlength=len(limits))
        return [int(length) for length in lengths]

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts could save time in a step of `num_rows` requests if nearly all were accepted."""
        times = self._relative_times(num_rows, num_rows * self.max_drafts)
        most = num_rows * (1.0 + 0.95 * np.arange(1, self.max_drafts + 1))
        return bool((most > _MIN_GAIN * num_rows * times[num_rows::num_rows]).any())

    def _best(self, num_rows: int, survival: NDArray[np.float64]) -> int:
        """Return the number of drafted tokens, taken in order of probability, with the highest expected throughput."""
        if not len(survival):
            return 0
        throughput = num_rows + np.concatenate(([0.0], np.cumsum(survival)))
        throughput /= self._relative_times(num_rows, len(survival))
        best = int(throughput.argmax())
        return best if throughput[best] >= _MIN_GAIN * throughput[0] else 0

    def _relative_times(self, num_rows: int, max_drafts: int) -> NDArray[np.float64]:
        """Return `StepCosts.estimate`. The result is cached for some steps, because it changes slowly."""
        self._num_asked += 1
        if self._num_asked % _KEPT_STEPS == 0:
            self._times.clear()
        key = num_rows, max_drafts
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self._costs.estimate(num_rows, max_drafts)
        return found
