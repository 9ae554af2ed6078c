"""A prefix cache as a plain dictionary from prefixes to pages: slow, and easy to believe."""

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
    """One cached page, and the handle of its end. The start of all prompts is an entry that holds no page."""

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
        self.num_pages: int = 0 if parent is None else parent.num_pages + 1
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
    """Keeps one entry per page under (namespace, bytes of all tokens up to its end); evicts by a scan."""

    def __init__(self, context: CacheContext) -> None:
        self._context = context
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
        return len(self._find(key, self._start))

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Take the pages that no entry holds yet; see `PrefixCache.insert`."""
        start = self._own(handle)
        num_pages = len(key.token_ids) // self._context.page_size
        if len(pages) != num_pages - start.num_pages:
            raise InvariantError(
                f"naive cache: got {len(pages)} pages from page {start.num_pages} on, for {num_pages} in all."
            )
        entries = self._find(key, start)
        self._touch(entries, key.priority)
        existing_pages = start.num_pages + len(entries)
        for page_idx in range(existing_pages, num_pages):
            parent = entries[-1] if entries else start
            entries.append(self._add(key, page_idx, pages[page_idx - start.num_pages], parent))
        return InsertResult(existing_pages, num_pages, entries[-1] if entries else start, _pages(entries))

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
        """Give up exactly `num_pages` pages, or all that are evictable."""
        given_up: list[_Entry] = []
        while len(given_up) < num_pages and (leaves := self._evictable_leaves()):
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
        """Entries that no lock keeps."""
        return len(self._entries) - self.locked_pages

    @property
    def locked_pages(self) -> int:
        """Entries that a lock keeps."""
        return sum(entry.num_locks > 0 for entry in self._entries.values())

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
        """Return the entries of the key's pages from `start` on, up to the first that is missing."""
        found = []
        for num_pages in range(start.num_pages + 1, len(key.token_ids) // self._context.page_size + 1):
            entry = self._entries.get(self._prefix(key, num_pages))
            if entry is None:
                break
            found.append(entry)
        return found

    def _touch(self, entries: list[_Entry], priority: int) -> None:
        now = self._context.clock()
        for entry in entries:
            entry.stats.last_access = now
            entry.stats.priority = max(entry.stats.priority, priority)

    def _add(self, key: PrefixKey, page_idx: int, page: np.int32, parent: _Entry) -> _Entry:
        page_size = self._context.page_size
        self._num_created += 1
        token_ids = key.token_ids[page_idx * page_size : (page_idx + 1) * page_size].copy()
        pages = np.array([page], dtype=np.int32)
        now = self._context.clock()
        stats = NodeStats(now, now, tokens=page_size, depth=page_idx * page_size, priority=key.priority)
        entry = _Entry(self._num_created, parent, self._prefix(key, page_idx + 1), token_ids, pages, stats)
        self._entries[entry.prefix] = entry
        parent.num_children += 1
        self._context.eviction.on_insert(stats)
        parent_id = parent.entry_id if parent.num_pages else None
        self._tell(CacheEvent("stored", page_size, entry.entry_id, parent_id, key.namespace, token_ids))
        return entry

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.prefix]
        if entry.parent is not None:
            entry.parent.num_children -= 1
        self._context.eviction.on_evict(entry.stats)
        self._tell(CacheEvent("removed", self._context.page_size, entry.entry_id, None, entry.prefix[0]))

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
