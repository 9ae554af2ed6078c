"""A prefix cache as a plain dictionary from prefixes to blocks of pages: slow, and easy to believe."""

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
    """One cached block, and the handle of its end. The start of all prompts is an entry that holds no page."""

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
        """Yield this entry and all in front of it, the start included."""
        step: _Entry | None = self
        while step is not None:
            yield step
            step = step.parent


class NaiveCache(PrefixCache):
    """Keeps one entry per block under (namespace, bytes of all tokens up to its end); evicts by a scan.

    Args:
        block_pages: pages in a block; a prefix is shared in whole blocks only. With more than one, this is the cache
            to try `PrefixCacheConformance.granularity_tokens` on.
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
        """Return the number of pages a match would find."""
        found = self._find(key, self._start)
        return found[-1].num_pages if found else 0

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Take the blocks that no entry holds yet; see `PrefixCache.insert`."""
        start = self._own(handle)
        num_pages = len(key.token_ids) // self._context.page_size
        if len(pages) != num_pages - start.num_pages:
            raise InvariantError(
                f"naive cache: got {len(pages)} pages from page {start.num_pages} on, for {num_pages} in all."
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
        """Keep the path to a handle from eviction until `unlock`."""
        entry = self._own(handle)
        entry.num_holds += 1
        for step in entry.upwards():
            step.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: there is none to undo.
        """
        entry = self._own(handle)
        if entry.num_holds == 0:
            raise InvariantError(f"naive cache: unlock of a handle at page {entry.num_pages} that nobody holds.")
        entry.num_holds -= 1
        for step in entry.upwards():
            step.num_locks -= 1

    def evict(self, num_pages: int) -> PageIds:
        """Give up `num_pages` pages, rounded up to whole blocks, or all that are evictable."""
        given_up: list[_Entry] = []
        while len(given_up) * self._block_pages < num_pages and (leaves := self._evictable_leaves()):
            leaf = min(leaves, key=lambda entry: self._context.eviction.priority(entry.stats))
            self._drop(leaf)
            given_up.append(leaf)
        return _pages(given_up)

    def reset(self) -> PageIds:
        """Forget everything that is not locked."""
        given_up = [entry for entry in self._entries.values() if entry.num_locks == 0]
        for entry in reversed(given_up):  # children before parents
            self._drop(entry)
        return _pages(given_up)

    @property
    def evictable_pages(self) -> int:
        """Pages that no lock keeps."""
        return len(self._entries) * self._block_pages - self.locked_pages

    @property
    def locked_pages(self) -> int:
        """Pages that a lock keeps."""
        return sum(entry.num_locks > 0 for entry in self._entries.values()) * self._block_pages

    @property
    def version(self) -> int:
        """A number that grows whenever pages come or go."""
        return self._version

    def walk(self) -> Iterator[NodeView]:
        """Yield every entry; they stand in order of creation, so parents come first."""
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
        """Return the entries of the key's blocks from `start` on, up to the first that is missing."""
        found = []
        for end in self._block_ends(start.num_pages, len(key.token_ids) // self._context.page_size):
            entry = self._entries.get(self._prefix(key, end))
            if entry is None:
                break
            found.append(entry)
        return found

    def _block_ends(self, start: int, end: int) -> range:
        """Return where the whole blocks between two places end, in pages."""
        return range(start + self._block_pages, end + 1, self._block_pages)

    def _touch(self, entries: list[_Entry], priority: int) -> None:
        now = self._context.clock()
        for entry in entries:
            entry.stats.last_access = now
            entry.stats.priority = max(entry.stats.priority, priority)

    def _add(self, key: PrefixKey, pages: PageIds, parent: _Entry) -> _Entry:
        """Add a block below an entry; the pages are the cache's own array."""
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
        self._tell(CacheEvent("stored", len(token_ids), entry.entry_id, parent_id, key.namespace, token_ids))
        return entry

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.prefix]
        if entry.parent is not None:
            entry.parent.num_children -= 1
        self._context.eviction.on_evict(entry.stats)
        self._tell(CacheEvent("removed", len(entry.token_ids), entry.entry_id, None, entry.prefix[0]))

    def _evictable_leaves(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.num_children == 0 and entry.num_locks == 0]

    def _own(self, handle: PrefixHandle) -> _Entry:
        if not isinstance(handle, _Entry):
            raise InvariantError(f"naive cache: got a handle of type {type(handle).__name__}, which it never gave out.")
        if handle is not self._start and self._entries.get(handle.prefix) is not handle:
            raise InvariantError(f"naive cache: the handle at page {handle.num_pages} was evicted.")
        return handle

    def _tell(self, event: CacheEvent) -> None:
        self._version += 1
        if self._context.on_event is not None:
            self._context.on_event(event)


def _pages(entries: list[_Entry]) -> PageIds:
    return np.concatenate([entry.pages for entry in entries]) if entries else NO_PAGES
