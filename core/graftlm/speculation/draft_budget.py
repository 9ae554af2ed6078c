"""Chooses the number of drafted tokens that maximises the expected number of tokens per second."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.speculation.step_costs import StepCosts

__all__ = ["MAX_DRAFTED_TOKENS", "DraftBudget"]

#: Maximum number of drafted tokens in one step. Their logits need memory, which is reserved on a GPU.
MAX_DRAFTED_TOKENS: Final = 512
#: Minimum expected gain in tokens per second for which tokens are drafted; the estimates are not more exact.
_MIN_GAIN: Final = 1.03
#: Maximum expected time of a step that is tried although no gain is expected, relative to the step without drafts.
_MAX_TRIAL_TIME: Final = 1.5


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

    def lengths(self, num_rows: int, probabilities: Sequence[float], limits: Sequence[int]) -> list[int]:
        """Return, for each of m drafts, the number of tokens to verify.

        Args:
            num_rows: number of requests that decode in the step, at least m.
            probabilities: for each draft, the probability that a token is accepted if all tokens before it are.
            limits: number of tokens in each draft.
        """
        max_len = max(limits, default=0)
        times = self._costs.optimistic(num_rows, sum(limits))
        # An upper bound of the accepted tokens, as if drafts were endless. It already excludes drafts in most steps.
        most = sum(min(p / (1.0 - p), max_len) if p < 1.0 else max_len for p in probabilities)
        if len(times) < 2 or num_rows + most < _MIN_GAIN * num_rows * times[1]:
            return [0] * len(limits)
        places = np.arange(1, max_len + 1)
        survival = np.asarray(probabilities, dtype=np.float64)[:, None] ** places
        survival[places > np.asarray(limits)[:, None]] = 0.0
        flat = survival.ravel()
        order = np.argsort(-flat, kind="stable")
        order = order[: min(np.count_nonzero(flat), MAX_DRAFTED_TOKENS)]
        num_taken = self._best(num_rows, flat[order])
        lengths = np.bincount(order[:num_taken] // max_len, minlength=len(limits))
        return [int(length) for length in lengths]

    def may_pay(self, num_rows: int) -> bool:
        """Return whether drafts could save time in a step of `num_rows` requests if nearly all were accepted."""
        times = self._costs.optimistic(num_rows, num_rows * self.max_drafts)
        most = num_rows + 0.95 * np.arange(len(times))
        return bool((most[1:] > _MIN_GAIN * num_rows * times[1:]).any())

    def _best(self, num_rows: int, survival: NDArray[np.float64]) -> int:
        """Return the number of drafted tokens, taken in order of probability, with the highest expected throughput."""
        if not len(survival):
            return 0
        gains = (num_rows + np.concatenate(([0.0], np.cumsum(survival)))) / num_rows
        times = self._costs.estimate(num_rows, len(survival))
        hoped = gains / self._costs.optimistic(num_rows, len(survival))
        best = int(hoped.argmax())
        if gains[best] < _MIN_GAIN * times[best]:  # a trial, whose time is limited
            best = int(hoped[times <= _MAX_TRIAL_TIME].argmax())
        is_better = hoped[best] >= _MIN_GAIN and self._costs.is_better(num_rows, float(gains[best] / times[best]))
        return best if is_better else 0
