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

    A call is charged with at most twice the average, since a call that computes a new prompt pays later.
    """

    def __init__(self) -> None:
        self._num_free = _NUM_FREE
        self._balance_s = 0.0
        self._mean_s = 0.0

    @property
    def may_ask(self) -> bool:
        """Whether the drafter may be asked now."""
        return self._num_free > 0 or self._balance_s >= 0.0

    def spend(self, seconds: float) -> None:
        """Add a call of the drafter."""
        charged_s = seconds if self._mean_s == 0.0 else min(seconds, 2 * self._mean_s)
        self._mean_s += (_WEIGHT if self._mean_s else 1.0) * (charged_s - self._mean_s)
        if self._num_free:
            self._num_free -= 1
        else:
            self._balance_s -= charged_s

    def earn(self, seconds: float) -> None:
        """Add the time that a draft saved, which is negative if it was rejected."""
        self._balance_s = min(self._balance_s + seconds, _MAX_SAVED_CALLS * self._mean_s)

    def add_step(self, seconds: float) -> None:
        """Add a step of some seconds."""
        self.earn(_SHARE * seconds)
