"""A cache's tiers below the device's memory, as the scheduler keeps them in step with its plans."""

import logging
import threading
from typing import cast

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache, StepCopies, TieredPrefixCache
from graftlm.memory.transfer_queue import TransferQueue

__all__ = ["LowerTiers"]

logger = logging.getLogger(__name__)

#: How long a cache that is given up may hold up the engine.
_PATIENCE_S = 2.0


class LowerTiers:
    """Passes queued copies to plans, and the fate of those plans to the cache.

    Attributes:
        cache: the cache, whose capabilities say that it has tiers.
    """

    def __init__(self, cache: PrefixCache, queue: TransferQueue) -> None:
        self.cache = cast(TieredPrefixCache, cache)
        self._queue = queue
        self._is_abandoned = False

    def begin_plan(self) -> None:
        """A step is about to be planned."""
        self._queue.begin_plan()

    def take(self, out_slots: NDArray[np.int64]) -> StepCopies | None:
        """Return the copies of the step being planned, which writes `out_slots`, int64 [T]; or None."""
        return self._queue.take(out_slots)

    def take_all(self) -> StepCopies | None:
        """Return every queued copy, while no step is in flight; or None."""
        return self._queue.take_all()

    def landed(self, copies: StepCopies) -> None:
        """The step of these copies is committed."""
        self._queue.landed(copies)
        self.cache.copied(copies)

    def lose_copies(self) -> None:
        """A step failed: no copy in flight or queued is made, or can be trusted."""
        for copies in self._queue.drop():
            self.cache.copies_lost(copies)

    def abandon(self) -> None:
        """Have the cache let go of its host memory and storage; its copies are forgotten. It is not used any more."""
        self._queue.drop()
        if self._is_abandoned:
            return
        self._is_abandoned = True
        letting_go = threading.Thread(target=_abandon, args=(self.cache,), name="graftlm-abandon", daemon=True)
        letting_go.start()
        letting_go.join(_PATIENCE_S)

    def restart(self, cache: PrefixCache) -> None:
        """Go on with a fresh cache after `abandon`."""
        self.cache = cast(TieredPrefixCache, cache)
        self._is_abandoned = False


def _abandon(cache: TieredPrefixCache) -> None:
    try:
        cache.abandon()
    except Exception:  # it may be the very cache that failed
        logger.exception("a prefix cache that is given up did not let go of its memory")
