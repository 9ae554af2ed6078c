"""A prefix cache that is a plain dictionary from prefixes to blocks of pages. It is slow, but obviously correct."""

from collections.abc import Iterator

import numpy as np

from graftlm.contracts import (
    NO_PAGES,
    CacheContext,
    InsertResult,
    NodeStats,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
)
from graftlm.errors import InvariantError
from graftlm.records import CacheEvent
from graftlm.types import PageIds, TokenIds

__all__ = ["NaiveCache"]


class _Entry:
    """One cached block, and the handle for the prefix that ends with this block. The root is an entry without pages."""

    def __init__(
        self,
        entry_id: int,
        parent: "_Entry | None",
        prefix: tuple[str, bytes],
        token_ids: TokenIds,
        pages: PageIds,
        stats: NodeStats,
    ) -> None:
        self.entry_id = entry_id
        self.parent = parent
        self.prefix = prefix
        self.token_ids = token_ids
        self.pages = pages
        self.stats = stats
        self.num_pages: int = 0 if parent is None else parent.num_pages + len(pages)
        self.num_children = 0
        self.num_holds = 0
        self.num_locks = 0

    def upwards(self) -> "Iterator[_Entry]":
        """Yield this entry and all its ancestors, including the root."""
        step: _Entry | None = self
        while step is not None:
            yield step
            step = step.parent


class NaiveCache(PrefixCache):
    """A cache with one entry per block; the entry's key is (namespace, bytes of all tokens up to the end of the block).

    An eviction scans all entries.

    Args:
        context: page size, eviction strategy, clock and event listener.
        block_pages: number of pages in a block. Only whole blocks are shared. Tests use a value above 1 to check
            `PrefixCacheConformance.granularity_tokens`.
    """

    def __init__(self, context: CacheContext, block_pages: int = 1) -> None:
        self._context = context
        self._block_pages = block_pages
        self._start = _Entry(0, None, ("", b""), NO_PAGES, NO_PAGES, NodeStats(created=0.0, last_access=0.0))
        self._entries: dict[tuple[str, bytes], _Entry] = {}
        self._num_created = 0
        self._version = 0

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix; see `PrefixCache.match`."""
        start = self._own(resume or self._start)
        found = self._find(key, start)
        self._touch(found, key.priority)
        for entry in found:
            entry.stats.hits += 1
            self._context.eviction.on_hit(entry.stats)
        return PrefixMatch(found[-1] if found else start, _pages(found))

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that `match` would find."""
        found = self._find(key, self._start)
        return found[-1].num_pages if found else 0

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Add the blocks that are not cached yet; see `PrefixCache.insert`.

        Raises:
            InvariantError: the number of pages does not fit the key, or the handle is not valid.
        """
        start = self._own(handle)
        num_pages = len(key.token_ids) // self._context.page_size
        if len(pages) != num_pages - start.num_pages:
            raise InvariantError(
                f"naive cache: expected {num_pages - start.num_pages} pages after page {start.num_pages}, "
                f"got {len(pages)}."
            )
        entries = self._find(key, start)
        self._touch(entries, key.priority)
        existing_pages = (entries[-1] if entries else start).num_pages
        for end in self._block_ends(existing_pages, num_pages):
            parent = entries[-1] if entries else start
            first = parent.num_pages - start.num_pages
            entries.append(self._add(key, pages[first : end - start.num_pages].copy(), parent))
        last = entries[-1] if entries else start
        return InsertResult(existing_pages, last.num_pages, last, _pages(entries))

    def lock(self, handle: PrefixHandle) -> None:
        """Protect the path to a handle from eviction until `unlock`."""
        entry = self._own(handle)
        entry.num_holds += 1
        for step in entry.upwards():
            step.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the handle has no lock.
        """
        entry = self._own(handle)
        if entry.num_holds == 0:
            raise InvariantError(f"naive cache: unlock of a handle at page {entry.num_pages} that is not locked.")
        entry.num_holds -= 1
        for step in entry.upwards():
            step.num_locks -= 1

    def evict(self, num_pages: int) -> PageIds:
        """Evict and return `num_pages` pages, rounded up to whole blocks, or all evictable pages if they are fewer."""
        evicted: list[_Entry] = []
        while len(evicted) * self._block_pages < num_pages and (leaves := self._evictable_leaves()):
            leaf = min(leaves, key=lambda entry: self._context.eviction.priority(entry.stats))
            self._drop(leaf)
            evicted.append(leaf)
        return _pages(evicted)

    def reset(self) -> PageIds:
        """Evict everything that is not locked and return its pages."""
        evicted = [entry for entry in self._entries.values() if entry.num_locks == 0]
        for entry in reversed(evicted):  # children before their parents
            self._drop(entry)
        return _pages(evicted)

    @property
    def evictable_pages(self) -> int:
        """Number of pages that no lock protects."""
        return len(self._entries) * self._block_pages - self.locked_pages

    @property
    def locked_pages(self) -> int:
        """Number of pages that a lock protects."""
        return sum(entry.num_locks > 0 for entry in self._entries.values()) * self._block_pages

    @property
    def version(self) -> int:
        """Version of the content, which grows with each block that is added or evicted."""
        return self._version

    def walk(self) -> Iterator[NodeView]:
        """Yield every entry in order of creation, so that parents come before their children."""
        for entry in self._entries.values():
            yield NodeView(
                node_id=entry.entry_id,
                parent_id=entry.parent.entry_id if entry.parent and entry.parent.num_pages else None,
                namespace=entry.prefix[0],
                token_ids=entry.token_ids,
                pages=entry.pages,
                num_locks=entry.num_locks,
                stats=entry.stats,
            )

    def _prefix(self, key: PrefixKey, num_pages: int) -> tuple[str, bytes]:
        return key.namespace, key.token_ids[: num_pages * self._context.page_size].tobytes()

    def _find(self, key: PrefixKey, start: _Entry) -> list[_Entry]:
        """Return the entries of the key's blocks after `start`, up to the first block that is not cached."""
        found = []
        for end in self._block_ends(start.num_pages, len(key.token_ids) // self._context.page_size):
            entry = self._entries.get(self._prefix(key, end))
            if entry is None:
                break
            found.append(entry)
        return found

    def _block_ends(self, start: int, end: int) -> range:
        """Return the end of each whole block between two positions, all in pages."""
        return range(start + self._block_pages, end + 1, self._block_pages)

    def _touch(self, entries: list[_Entry], priority: int) -> None:
        now = self._context.clock()
        for entry in entries:
            entry.stats.last_access = now
            entry.stats.priority = max(entry.stats.priority, priority)

    def _add(self, key: PrefixKey, pages: PageIds, parent: _Entry) -> _Entry:
        """Add a block below an entry. The entry refers to the array `pages`, so the caller must pass a copy."""
        self._num_created += 1
        depth, end_pages = parent.num_pages * self._context.page_size, parent.num_pages + len(pages)
        token_ids = key.token_ids[depth : end_pages * self._context.page_size].copy()
        now = self._context.clock()
        stats = NodeStats(now, now, tokens=len(token_ids), depth=depth, priority=key.priority)
        entry = _Entry(self._num_created, parent, self._prefix(key, end_pages), token_ids, pages, stats)
        self._entries[entry.prefix] = entry
        parent.num_children += 1
        self._context.eviction.on_insert(stats)
        parent_id = parent.entry_id if parent.num_pages else None
        self._report(CacheEvent("stored", len(token_ids), entry.entry_id, parent_id, key.namespace, token_ids))
        return entry

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.prefix]
        if entry.parent is not None:
            entry.parent.num_children -= 1
        self._context.eviction.on_evict(entry.stats)
        self._report(CacheEvent("removed", len(entry.token_ids), entry.entry_id, None, entry.prefix[0]))

    def _evictable_leaves(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.num_children == 0 and entry.num_locks == 0]

    def _own(self, handle: PrefixHandle) -> _Entry:
        if not isinstance(handle, _Entry):
            raise InvariantError(f"naive cache: a handle of type {type(handle).__name__} is not from this cache.")
        if handle is not self._start and self._entries.get(handle.prefix) is not handle:
            raise InvariantError(f"naive cache: the handle at page {handle.num_pages} was evicted.")
        return handle

    def _report(self, event: CacheEvent) -> None:
        self._version += 1
        if self._context.on_event is not None:
            self._context.on_event(event)


def _pages(entries: list[_Entry]) -> PageIds:
    return np.concatenate([entry.pages for entry in entries]) if entries else NO_PAGES
