"""Moves pages between the pool, the prefix cache and the rows of running requests."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import LoadedPages, PrefixCache, PrefixHandle, PrefixKey, PrefixMatch, StepCopies
from graftlm.errors import InvariantError
from graftlm.memory.lower_tiers import LowerTiers
from graftlm.memory.no_cache import NoCache
from graftlm.memory.page_owners import KVUsage, check_owners, count_owners
from graftlm.memory.page_pool import PagePool
from graftlm.memory.request_table import RequestTable
from graftlm.memory.row_states import RowStates
from graftlm.memory.row_windows import RowWindows
from graftlm.memory.window_pages import WindowPages
from graftlm.types import PageIds

__all__ = ["KVManager", "Reuse"]

_NOTHING_LOADED = LoadedPages()


@dataclass(frozen=True, slots=True)
class Reuse:
    """Numbers of cached tokens that a request reuses: all of them, those from host memory and those from storage."""

    num_tokens: int
    host_tokens: int = 0
    storage_tokens: int = 0


class KVManager:
    """Allocates KV pages for rows, and shares them through the prefix cache.

    A row's page table, with page_size 4 and 18 tokens computed:

        page    0        1        2        3        4
              |cached..|cached..|own.....|own.....|own..   |
              |<-  the cache's  ->|<-    the row's        ->|
              |<-  locked by the row's handle; shared     ->|<- only this row writes here

    Steps run in the order in which they are planned. A page may therefore be inserted into the cache as soon as the
    step that fills it is planned. A page may also be freed while a planned step still uses it, because the page's next
    owner writes only in a later step.

    Args:
        window: allocates window pages if sliding-window layers have their own memory. Each page that a row reserves
            then also has a window page, until the row's window has passed the page or the cache evicts the window page.
            The cache must have the capability `window`.
        states: tracks the recurrent states of rows; None if the model has no such states. The cache must have the
            capability `state`.

    Attributes:
        cache: the prefix cache; a `NoCache` while `has_cache` is False.
        has_cache: whether the latest `restart` could create a cache.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        table: RequestTable,
        page_size: int,
        window: WindowPages | None = None,
        tiers: LowerTiers | None = None,
        states: RowStates | None = None,
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.has_cache = True
        self.tiers = tiers
        self.table = table
        self.page_size = page_size
        self.window = window
        self.states = states
        self.evicted_pages = 0
        self.row_windows = None if window is None else RowWindows(window, table)
        self._handles: list[PrefixHandle | None] = [None] * table.num_rows

    @property
    def available_pages(self) -> int:
        """Number of pages that are free or evictable."""
        return self.pool.num_free + self.cache.evictable_pages

    @property
    def available_window_pages(self) -> int:
        """Number of window pages that are free or evictable; `available_pages` if all layers share one memory."""
        if self.window is None:
            return self.available_pages
        return self.window.num_free + self.cache.evictable_window_pages

    @property
    def usage(self) -> KVUsage:
        """Numbers of pages by owner."""
        return count_owners(self.pool, self.cache, self.table)

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def attach(self, row: int, key: PrefixKey) -> Reuse:
        """Let a new row use the longest cached prefix of `key`, and the following pages from lower tiers.

        Effects: locks the prefix, writes its pages to the row's page table, and sets `computed` to its length. The step
            that is being planned loads blocks from lower tiers to new pages; these pages are inserted into the cache
            immediately.

        Returns: the numbers of reused tokens.
        """
        match = self.cache.match(key)
        self._lock(row, match.handle)
        self._set_cached(row, 0, match.pages)
        if self.states is not None:
            self._begin_state(self.states, row, match)
        loaded = _NOTHING_LOADED if self.tiers is None else self._load(row, key, self.tiers)
        size = self.page_size
        return Reuse(int(self.table.computed[row]), loaded.host * size, loaded.storage * size)

    def advance(self, row: int, key: PrefixKey) -> int:
        """Reuse tokens of a row's prompt that another request has cached since the row's last match.

        Effects: locks the longer prefix, writes its pages to the row's page table, increases `computed`, and frees all
            own pages of the row.

        Returns: number of additional reused tokens.
        """
        handle = self._handle(row)
        match = self.cache.match(key, resume=handle)
        if not len(match.pages):
            return 0
        before = int(self.table.computed[row])
        self._move_lock(row, handle, match.handle)
        own = self.table.own_pages(row)
        self._set_cached(row, handle.num_pages, match.pages)
        self._free(own)
        if self.states is not None:
            self._begin_state(self.states, row, match)
        return int(self.table.computed[row]) - before

    def _begin_state(self, states: RowStates, row: int, match: PrefixMatch) -> None:
        num_tokens = int(self.table.computed[row])
        found_pages = match.found_pages
        states.begin(row, num_tokens, num_tokens if found_pages is None else found_pages * self.page_size)

    def plan_states(self, row: int, start: int, end: int) -> None:
        """Plan the states of a chunk of a row, start : end. Call it before `publish`."""
        if self.states is not None:
            self.states.plan_chunk(row, start, end, self.cache.state_interval_tokens)

    def reserve(self, rows: NDArray[np.int32], num_tokens: NDArray[np.int64]) -> bool:
        """Allocate the pages that each row needs for `num_tokens` tokens, with evictions if necessary.

        Returns: whether there were enough pages; if not, the rows are unchanged.
        """
        table = self.table
        have = table.num_pages[rows]
        # After jump-forward has replaced tokens by fewer tokens, a row may have more pages than it needs.
        needed = num_tokens if self.page_size == 1 else -(-num_tokens // self.page_size)
        lacking = np.maximum(needed - have, 0)
        total = int(np.add.reduce(lacking))
        if total == 0:
            return True
        if not self.make_room(total):
            return False
        pages = self._alloc(total)
        row, column = rows, have
        if total != len(rows) or np.maximum.reduce(lacking) > 1:  # otherwise each row needs one page
            first = lacking.cumsum() - lacking
            row, column = rows.repeat(lacking), np.arange(total) + (have - first).repeat(lacking)
        table.page_table[row, column] = pages
        if self.row_windows is not None:
            self.row_windows.page_table[row, column] = self.row_windows.pages.writable(pages)
        table.num_pages[rows] = have + lacking
        return True

    def extend(self, row: int, num_tokens: int) -> bool:
        """Allocate the pages that one row needs for `num_tokens` tokens; faster than `reserve`."""
        table = self.table
        have, needed = int(table.num_pages[row]), self.pages_for(num_tokens)
        if needed <= have:
            return True
        if not self.make_room(needed - have):
            return False
        table.page_table[row, have:needed] = pages = self._alloc(needed - have)
        if self.row_windows is not None:
            self.row_windows.page_table[row, have:needed] = self.row_windows.pages.writable(pages)
        table.num_pages[row] = needed
        return True

    def has_window_room(self, num_lacking: int, num_others: int) -> bool:
        """Return whether window memory has room for `num_lacking` pages of a row, and one page for each other row.

        A single row always fits: it continues in chunks that fit, and frees the pages before its window.
        """
        if self.window is None or num_others == 0:
            return True
        return min(num_lacking, self.window.span.keep_pages + 1) + 1 + num_others <= self.available_window_pages

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` pages and as many window pages are free. Return False if this is impossible."""
        missing = num_pages - self.pool.num_free
        if missing > self.cache.evictable_pages or num_pages > self.available_window_pages:
            return False
        if missing > 0:
            pages = self.cache.evict(missing)
            self.evicted_pages += len(pages)
            self._free(pages)
        if self.window is not None and num_pages > self.window.num_free:
            self._evict_window(self.window, num_pages - self.window.num_free)
        return self.pool.num_free >= num_pages

    def _evict_window(self, window: WindowPages, num_pages: int) -> None:
        """Evict window pages from the cache."""
        evicted = self.cache.evict_window(num_pages)
        self.evicted_pages += len(evicted.pages)
        self._free(evicted.pages)
        window.free(evicted.window_pages)

    def publish(self, row: int, key: PrefixKey) -> None:
        """Insert the row's whole pages for `key` into the cache; the row then uses the cached pages.

        Args:
            key: tokens whose keys and values are written by the steps planned so far.

        Effects: moves the row's lock to the end of the cached part, and frees own pages whose tokens the cache already
            has. Window pages that the step uses stay locked until `settle_step`.
        """
        start = self._handle(row).num_pages
        self._offer(row, key)
        if self.row_windows is not None:
            self.row_windows.protect_step(self.cache, start, self._handle(row))
        if self.states is not None:
            self.states.store(row)

    def settle_step(self) -> None:
        """Unlock the window pages and states that were locked for the step that has just been planned."""
        if self.row_windows is not None:
            self.row_windows.settle(self.cache)
        if self.states is not None:
            self.states.settle()

    def _offer(self, row: int, key: PrefixKey) -> None:
        """Insert the row's whole pages for `key` into the cache, and move the row's lock to their end."""
        table = self.table
        handle = self._handle(row)
        start, whole = handle.num_pages, len(key.token_ids) // self.page_size
        if whole <= start:
            return
        pages = table.page_table[row, start:whole].copy()
        result = self.cache.insert(key, pages, handle)
        table.page_table[row, start : result.cached_pages] = result.pages
        table.cached_pages[row] = result.cached_pages
        duplicates = pages[: result.existing_pages - start]
        if self.row_windows is not None:
            self.row_windows.pages.move(duplicates, result.pages[: len(duplicates)])
            held = self.row_windows.pages.readable(result.pages)
            self.row_windows.page_table[row, start : result.cached_pages] = held
        self._move_lock(row, handle, result.handle)
        self._free(duplicates)
        self._store(row, key)

    def release(self, row: int, key: PrefixKey) -> None:
        """Insert a row's computed pages into the cache, free its other pages, and free the row.

        Args:
            key: the row's tokens whose keys and values are written by the steps planned so far.
        """
        self._offer(row, key)
        if self.states is not None:
            self.states.release(row, len(key.token_ids))
        self.discard(row)

    def discard(self, row: int) -> None:
        """Free a row and its own pages without inserting them into the cache."""
        own = self.table.own_pages(row)
        if self.row_windows is not None:
            self.row_windows.drop_row(row, self.cache)
        if self.states is not None:
            self.states.drop_row(row)
        self.cache.unlock(self._handle(row))
        self._handles[row] = None
        self.table.drop_row(row)
        self._free(own)

    def reset(self) -> int:
        """Remove all cached prefixes that no row uses. Return the number of freed pages."""
        pages = self.cache.reset()
        self._free(pages)
        return len(pages)

    def restart(self, make_cache: Callable[[], PrefixCache]) -> None:
        """Reset to empty memory and a new cache.

        Effects: the old cache releases its host memory before the new cache allocates its own. If no cache can be
            created, the memory stays empty, `has_cache` is False, and no step may be planned until another call
            succeeds.

        Raises:
            Exception: any error of `make_cache`.
        """
        self.close_cache()
        self._replace_cache(make_cache())
        self.has_cache = True

    def close_cache(self) -> None:
        """Reset to empty memory without a cache.

        Effects: the cache releases host memory and storage. `has_cache` is False, and no step may be planned until
            `restart` succeeds.
        """
        if self.tiers is not None:
            self.tiers.abandon()
        self.pool = PagePool(self.pool.num_pages)
        self._handles = [None] * self.table.num_rows
        self.table.clear()
        if self.row_windows is not None:
            self.row_windows.clear()
        if self.states is not None:
            self.states.clear()
        self._replace_cache(NoCache())
        self.has_cache = False

    def _replace_cache(self, cache: PrefixCache) -> None:
        self.cache = cache
        if self.tiers is not None:
            self.tiers.restart(cache)

    def take_copies(self, out_slots: NDArray[np.int64]) -> StepCopies | None:
        """Return the copies for the step that is being planned, or None. The step writes `out_slots`, int64 [T]."""
        return None if self.tiers is None else self.tiers.take(out_slots)

    def _load(self, row: int, key: PrefixKey, tiers: LowerTiers) -> LoadedPages:
        """Extend a new row's match with pages from lower tiers."""
        table = self.table
        start = int(table.num_pages[row])
        loaded = _NOTHING_LOADED
        offer = tiers.cache.find(key, start)
        if offer is not None and not self.make_room(offer.num_pages):
            tiers.cache.decline(offer)
        elif offer is not None:
            pages = self.pool.alloc(offer.num_pages)
            end = start + len(pages)
            table.page_table[row, start:end] = pages
            table.num_pages[row] = end
            table.computed[row] = end * self.page_size
            loaded = tiers.cache.load(offer, pages)
            self.publish(row, PrefixKey(key.token_ids[: end * self.page_size], key.namespace, key.priority))
        self._store(row, key)
        return loaded

    def _store(self, row: int, key: PrefixKey) -> None:
        """Let the cache store a row's cached pages in lower tiers."""
        if self.tiers is None:
            return
        num_pages = min(int(self.table.cached_pages[row]), len(key.token_ids) // self.page_size)
        tokens = key.token_ids[: num_pages * self.page_size]
        pages = self.table.page_table[row, :num_pages]
        self.tiers.cache.store(PrefixKey(tokens, key.namespace, key.priority), pages)

    def check(self) -> None:
        """Check that every page has exactly one owner; see `check_owners`."""
        check_owners(self.pool, self.cache, self.table, self.row_windows)
        if self.states is not None:
            is_cached: NDArray[np.bool_] = np.zeros(self.pool.num_pages, dtype=np.bool_)
            for node in self.cache.walk():
                is_cached[node.pages] = True
            self.states.pool.check(is_cached, self.states.taken())

    def _handle(self, row: int) -> PrefixHandle:
        handle = self._handles[row]
        if handle is None:
            raise InvariantError(f"row {row} has no handle of the prefix cache")
        return handle

    def _set_cached(self, row: int, start: int, pages: PageIds) -> None:
        end = start + len(pages)
        table = self.table
        table.page_table[row, start:end] = pages
        table.cached_pages[row] = table.num_pages[row] = end
        table.computed[row] = end * self.page_size
        if self.row_windows is not None:
            self.row_windows.look_up(row, start, end)

    def _lock(self, row: int, handle: PrefixHandle) -> None:
        self.cache.lock(handle)
        self._handles[row] = handle
        if self.row_windows is not None:
            self.row_windows.lock(row, self.cache, handle)

    def _move_lock(self, row: int, old: PrefixHandle, new: PrefixHandle) -> None:
        self._lock(row, new)
        self.cache.unlock(old)

    def _alloc(self, num_pages: int) -> PageIds:
        """Allocate pages, and a window page for each page if there are window pages."""
        pages = self.pool.alloc(num_pages)
        if self.window is not None:
            self.window.assign(pages)
        return pages

    def _free(self, pages: PageIds) -> None:
        """Free pages, their window pages, and the states that are stored for them."""
        if self.window is not None:
            self.window.free(pages)
        if self.states is not None:
            self.states.pool.drop(pages)
        self.pool.free(pages)
