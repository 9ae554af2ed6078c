"""Limits the time that an expensive drafter may use."""

from typing import Final

__all__ = ["DraftAllowance"]

#: Number of first calls whose time is not charged; they measure how often drafts are accepted.
_NUM_FREE: Final = 16
#: Share of the time of steps that a drafter may use even if its drafts save no time.
_SHARE: Final = 0.02
#: Maximum balance, as a number of average calls.
_MAX_SAVED_CALLS: Final = 16
#: Weight of the latest call in the average time of a call.
_WEIGHT: Final = 0.1


class DraftAllowance:
    """Limits a drafter's time to the time that its accepted drafts saved, plus a small share of the time of steps.

    `Speculator` has one for each expensive drafter. A call that computes a new prompt takes long, and saves time only
    later. Therefore at most twice the average time of a call is charged to the balance; the remaining time becomes a
    debt. The share of the time of steps repays the debt before it is added to the balance. Saved time is added to the
    balance, and only a surplus repays the debt. All time is charged in the end, except that of the first calls.
    """

    def __init__(self) -> None:
        self._num_free = _NUM_FREE
        self._balance_s = 0.0
        self._debt_s = 0.0
        self._mean_s = 0.0
        self._step_s = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether the drafter may be called now."""
        return self._num_free > 0 or self._balance_s >= 0.0

    def spend(self, seconds: float) -> None:
        """Charge the time of a call of the drafter.

        The first calls are not charged. A very short call, in which the drafter computed nothing, is always charged.
        """
        charged_s = seconds if self._mean_s == 0.0 else min(seconds, 2 * self._mean_s)
        self._mean_s += (_WEIGHT if self._mean_s else 1.0) * (seconds - self._mean_s)
        if self._num_free and seconds >= _SHARE * self._step_s:
            self._num_free -= 1
        else:
            self._balance_s -= charged_s
            self._debt_s += seconds - charged_s

    def earn(self, seconds: float) -> None:
        """Add the time that a draft saved; it is negative if too few tokens were accepted."""
        balance_s, most_s = self._balance_s + seconds, _MAX_SAVED_CALLS * self._mean_s
        self._balance_s = min(balance_s, most_s)
        self._debt_s = max(0.0, self._debt_s - max(0.0, balance_s - most_s))

    def add_step(self, seconds: float) -> None:
        """Add the drafter's share of a step that took `seconds`."""
        self._step_s = seconds
        repaid_s = min(_SHARE * seconds, self._debt_s)
        self._debt_s -= repaid_s
        self.earn(_SHARE * seconds - repaid_s)
