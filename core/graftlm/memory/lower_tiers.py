"""Connects a cache's host and storage tiers with the scheduler's plans."""

import logging
import threading
from typing import cast

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import PrefixCache, StepCopies, TieredPrefixCache
from graftlm.memory.transfer_queue import TransferQueue

__all__ = ["LowerTiers"]

logger = logging.getLogger(__name__)

#: Maximum time that the engine waits for an abandoned cache, in seconds.
_ABANDON_TIMEOUT_S = 2.0


class LowerTiers:
    """Adds queued copies to plans, and reports to the cache whether the copies were completed or lost.

    Attributes:
        cache: the cache, which has the capability `tiers`.
    """

    def __init__(self, cache: PrefixCache, queue: TransferQueue) -> None:
        self.cache = cast(TieredPrefixCache, cache)
        self._queue = queue
        self._is_abandoned = False

    def begin_plan(self) -> None:
        """Update the queue at the start of a plan."""
        self._queue.begin_plan()

    def take(self, out_slots: NDArray[np.int64]) -> StepCopies | None:
        """Return the copies for the step that is being planned, or None. The step writes `out_slots`, int64 [T]."""
        return self._queue.take(out_slots)

    def take_all(self) -> StepCopies | None:
        """Return all queued copies, or None. No step may be in flight."""
        return self._queue.take_all()

    def copies_done(self, copies: StepCopies) -> None:
        """Report to the cache that the step with these copies has ended."""
        self._queue.copies_done(copies)
        self.cache.copied(copies)

    def lose_copies(self) -> None:
        """Drop all copies, queued or in flight, after a step failed; the content of their targets is undefined."""
        for copies in self._queue.drop():
            self.cache.copies_lost(copies)

    def abandon(self) -> None:
        """Drop all copies and release the cache's host memory and storage. The cache is not used afterwards."""
        self._queue.drop()
        if self._is_abandoned:
            return
        self._is_abandoned = True
        abandoning = threading.Thread(target=_abandon, args=(self.cache,), name="graftlm-abandon", daemon=True)
        abandoning.start()
        abandoning.join(_ABANDON_TIMEOUT_S)

    def restart(self, cache: PrefixCache) -> None:
        """Continue with a new cache after `abandon`."""
        self.cache = cast(TieredPrefixCache, cache)
        self._is_abandoned = False


def _abandon(cache: TieredPrefixCache) -> None:
    try:
        cache.abandon()
    except Exception:  # the cache may be in an undefined state
        logger.exception("an abandoned prefix cache did not release its memory")
