"""The slots of recurrent states: which are free, and which store the state at the end of a cached page."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from graftlm.errors import InvariantError
from graftlm.records import StateStats
from graftlm.types import PageIds

__all__ = ["StatePool"]


class StatePool:
    """Allocates slots for snapshots of states, and evicts the least recently used stored state if none is free.

        slot     0        1 ... R          R + 1 ............................ R + S
                 zero     one per row      snapshots: free, taken by a row, or stored for a page

    A stored state belongs to a page. It stays stored when the node of the page is split, and is freed with the page.
    A stored state with locks is not evicted. Implements `StateView`.

    Args:
        num_rows: R, number of rows of the request table.
        num_snapshots: S.
        num_pages: number of pages of the KV memory.

    Attributes:
        num_evicted: number of stored states that were evicted since the start.
        num_stores: number of states that were stored since the start.
    """

    def __init__(self, num_rows: int, num_snapshots: int, num_pages: int) -> None:
        self.num_rows = num_rows
        self.num_snapshots = num_snapshots
        self.num_evicted = 0
        self.num_stores = 0
        self._version = 0
        self._slot_of = np.zeros(num_pages, dtype=np.int32)  # 0: no state is stored
        self._recency: OrderedDict[int, None] = OrderedDict()  # pages with a state, least recently used first
        self._locks: Counter[int] = Counter()
        self._free = self._all_snapshots()

    def _all_snapshots(self) -> list[int]:
        return list(range(self.num_rows + self.num_snapshots, self.num_rows, -1))

    @property
    def num_slots(self) -> int:
        """Number of all slots, including slot 0 and those of the rows."""
        return 1 + self.num_rows + self.num_snapshots

    @property
    def num_stored(self) -> int:
        """Number of pages with a stored state."""
        return len(self._recency)

    @property
    def num_free(self) -> int:
        """Number of free snapshot slots."""
        return len(self._free)

    @property
    def stats(self) -> StateStats:
        """The numbers of slots by use, and the counters."""
        return StateStats(self.num_snapshots, self.num_stored, self.num_free, self.num_stores, self.num_evicted)

    @property
    def version(self) -> int:
        """A counter that increases whenever the result of `holds` may have changed."""
        return self._version

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return whether the state after each page's last token is stored: bool, same shape as `pages`."""
        held: NDArray[np.bool_] = self._slot_of[pages] != 0
        return held

    def slot_of(self, page: int) -> int:
        """Return the slot of a page's state.

        Raises:
            InvariantError: no state is stored for the page.
        """
        slot = int(self._slot_of[page])
        if not slot:
            raise InvariantError(f"state pool: no state is stored for page {page}")
        return slot

    def take(self) -> int | None:
        """Allocate a snapshot slot, with an eviction if necessary; None if no stored state can be evicted.

        The caller owns the slot until it calls `give_back` or `store`.
        """
        if not self._free:
            page = next((page for page in self._recency if page not in self._locks), None)
            if page is None:
                return None
            self._drop(page)
            self.num_evicted += 1
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot that `take` returned."""
        self._free.append(slot)

    def store(self, page: int, slot: int) -> bool:
        """Store the state in a slot for a page. Return False if the page has a state; the caller then keeps the slot.

        Effects: the pool owns the slot if it returns True.
        """
        if self._slot_of[page]:
            self.touch(page)
            return False
        self._slot_of[page] = slot
        self._recency[page] = None
        self.num_stores += 1
        self._version += 1
        return True

    def touch(self, page: int) -> None:
        """Record a use of a page's state, which is evicted later than the others now."""
        self._recency.move_to_end(page)

    def lock(self, page: int) -> None:
        """Protect a page's state from eviction until `unlock`; locks are counted."""
        self._locks[page] += 1

    def unlock(self, page: int) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the page's state is not locked.
        """
        num_locks = self._locks[page]
        if num_locks == 0:
            raise InvariantError(f"state pool: unlock of page {page}, whose state is not locked")
        if num_locks == 1:
            del self._locks[page]
        else:
            self._locks[page] = num_locks - 1

    def drop(self, pages: PageIds) -> None:
        """Free the states of pages that leave the cache. Pages without a state are ignored.

        Raises:
            InvariantError: a page's state is locked.
        """
        for page in pages[self.holds(pages)].tolist():
            if page in self._locks:
                raise InvariantError(f"state pool: page {page} is freed, but a row reads its state")
            self._drop(page)

    def evict(self, num_states: int) -> int:
        """Evict up to `num_states` stored states without locks, least recently used first; return their number."""
        pages = [page for page in self._recency if page not in self._locks][:num_states]
        for page in pages:
            self._drop(page)
        self.num_evicted += len(pages)
        return len(pages)

    def clear(self) -> None:
        """Free all snapshot slots."""
        self._slot_of[:] = 0
        self._recency.clear()
        self._locks.clear()
        self._free = self._all_snapshots()
        self._version += 1

    def check(self, cached_pages: NDArray[np.bool_], taken: Iterable[int]) -> None:
        """Verify that each snapshot slot has exactly one owner, and that states are stored only for cached pages.

        Args:
            cached_pages: bool [num_pages], which pages are in the prefix cache.
            taken: the slots that rows own.

        Raises:
            InvariantError: the check fails; the message has some of the slots or pages.
        """
        pages = np.flatnonzero(self._slot_of)
        owners = Counter([*self._free, *taken, *self._slot_of[pages].tolist()])
        wrong = [slot for slot in self._all_snapshots() if owners[slot] != 1]
        if wrong or owners.total() != self.num_snapshots:
            raise InvariantError(f"state slots {wrong[:8]} of {self.num_snapshots} have no owner or several")
        stray = pages[~cached_pages[pages]]
        if len(stray):
            raise InvariantError(f"states are stored for pages {stray[:8].tolist()}, which are not cached")
        if set(pages.tolist()) != set(self._recency):
            raise InvariantError("state pool: the order of eviction does not have the pages with states")

    def _drop(self, page: int) -> None:
        self._free.append(int(self._slot_of[page]))
        self._slot_of[page] = 0
        del self._recency[page]
        self._version += 1
