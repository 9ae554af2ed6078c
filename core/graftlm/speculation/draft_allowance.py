"""How much time an expensive drafter may take."""

from typing import Final

__all__ = ["DraftAllowance"]

#: First calls, which are free: they show how often the drafter is right.
_NUM_FREE: Final = 16
#: Part of the time of steps that may be spent although drafts do not pay.
_SHARE: Final = 0.02
#: Number of calls for which time may be saved up.
_MAX_SAVED_CALLS: Final = 16
#: Weight of the latest call in the average.
_WEIGHT: Final = 0.1


class DraftAllowance:
    """Limits a drafter's time to the time that its accepted drafts saved, and a small part of the time of steps.

    A call that computes a new prompt takes long, and pays later. So what exceeds twice the average time of a call
    becomes a debt: the part of the time of steps repays it before it pays for calls again, and saved time goes on
    paying for calls. All time is charged in the end, except that of the free first calls.
    """

    def __init__(self) -> None:
        self._num_free = _NUM_FREE
        self._balance_s = 0.0
        self._debt_s = 0.0
        self._mean_s = 0.0
        self._step_s = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether the drafter may be asked now."""
        return self._num_free > 0 or self._balance_s >= 0.0

    def spend(self, seconds: float) -> None:
        """Add a call of the drafter. A call within the part of a step's time computed nothing, and is no free call."""
        charged_s = seconds if self._mean_s == 0.0 else min(seconds, 2 * self._mean_s)
        self._mean_s += (_WEIGHT if self._mean_s else 1.0) * (seconds - self._mean_s)
        if self._num_free and seconds >= _SHARE * self._step_s:
            self._num_free -= 1
        else:
            self._balance_s -= charged_s
            self._debt_s += seconds - charged_s

    def earn(self, seconds: float) -> None:
        """Add the time that a draft saved, which is negative if it was rejected."""
        balance_s, most_s = self._balance_s + seconds, _MAX_SAVED_CALLS * self._mean_s
        self._balance_s = min(balance_s, most_s)
        self._debt_s = max(0.0, self._debt_s - max(0.0, balance_s - most_s))

    def add_step(self, seconds: float) -> None:
        """Add a step of some seconds."""
        self._step_s = seconds
        repaid_s = min(_SHARE * seconds, self._debt_s)
        self._debt_s -= repaid_s
        self.earn(_SHARE * seconds - repaid_s)
