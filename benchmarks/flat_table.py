"""A prefix cache without a tree: a table of whole prefixes, as a baseline in benchmarks.

Every inserted prefix is one entry. A prompt matches an entry if it begins with all tokens of the entry. An entry refers
to the shorter entry that it continues, and is never split. Two prompts with a common beginning share nothing, unless
this beginning was inserted as a prefix.

    table   "system"                     2 pages
            "system question 1 answer"   4 pages in addition to those of "system"
            "system question 2"          3 pages in addition to those of "system"; no other question finds it
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count

import numpy as np

from graftlm import Provider, hookimpl
from graftlm.contracts import (
    NO_PAGES,
    CacheCapabilities,
    CacheContext,
    InsertResult,
    NodeStats,
    NodeView,
    NoOptions,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
)
from graftlm.errors import InvariantError
from graftlm.types import PageIds

__all__ = ["TablePlugin", "WholePrefixTable"]

_TOKEN_BYTES = 4


class _Entry:
    """One prefix. It has only the pages after its parent, the entry that it continues. The root has no parent."""

    __slots__ = ("entry_id", "key", "num_children", "num_holds", "num_locks", "num_pages", "pages", "parent", "stats")

    def __init__(
        self, entry_id: int, parent: "_Entry | None", key: tuple[str, bytes], pages: PageIds, stats: NodeStats
    ) -> None:
        self.entry_id, self.parent, self.key, self.pages, self.stats = entry_id, parent, key, pages, stats
        self.num_pages: int = len(pages) + (0 if parent is None else parent.num_pages)
        self.num_children = self.num_holds = self.num_locks = 0

    def back_to(self, start: "_Entry") -> "list[_Entry] | None":
        """Return the entries from `start` (exclusive) to this entry; None if `start` is not an ancestor."""
        path, step = [], self
        while step is not start:
            if step.parent is None:
                return None
            path.append(step)
            step = step.parent
        return path[::-1]


class WholePrefixTable(PrefixCache):
    """A prefix cache of whole prefixes, with LRU eviction. A lookup tries every length, the longest first."""

    def __init__(self, context: CacheContext) -> None:
        self._page_size, self._clock = context.page_size, context.clock
        self._entry_ids = count()
        self._start = _Entry(next(self._entry_ids), None, ("", b""), NO_PAGES, NodeStats(0.0, 0.0))
        self._table: dict[tuple[str, bytes], _Entry] = {}
        self._lengths: Counter[int] = Counter()  # length of an entry in pages -> number of entries
        self._evictable_pages = self._locked_pages = self._version = 0

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest entry that a key begins with; see `PrefixCache.match`."""
        path = self._find(key, self._start if resume is None else self._own(resume))
        for entry in path[1:]:
            entry.stats.hits += 1
            entry.stats.last_access = self._clock()
        return PrefixMatch(path[-1], _join(path[1:]))

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find."""
        return self._find(key, self._start)[-1].num_pages

    def _find(self, key: PrefixKey, start: _Entry) -> list[_Entry]:
        """Return the entries from `start` (inclusive) to the longest entry that is a prefix of the key."""
        tokens, page_bytes = key.token_ids.tobytes(), self._page_size * _TOKEN_BYTES
        for num_pages in sorted(self._lengths, reverse=True):
            if start.num_pages < num_pages <= len(tokens) // page_bytes:
                entry = self._table.get((key.namespace, tokens[: num_pages * page_bytes]))
                if entry is not None and (path := entry.back_to(start)) is not None:
                    return [start, *path]
        return [start]

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Add an entry for a key if there is none; see `PrefixCache.insert`.

        If the key has an entry that does not continue the handle's entry, no pages are inserted. The caller still
        reads the handle's pages, so its lock must protect these pages.
        """
        start = self._own(handle)
        if not len(pages):
            return InsertResult(start.num_pages, start.num_pages, start, NO_PAGES)
        num_bytes = (start.num_pages + len(pages)) * self._page_size * _TOKEN_BYTES
        whole = (key.namespace, key.token_ids.tobytes()[:num_bytes])
        known = self._table.get(whole)
        if known is None:
            entry = self._add(whole, pages.copy(), start)
            return InsertResult(start.num_pages, entry.num_pages, entry, pages)
        path = known.back_to(start)
        if path is None:
            return InsertResult(start.num_pages, start.num_pages, start, NO_PAGES)
        return InsertResult(known.num_pages, known.num_pages, known, _join(path))

    def _add(self, whole: tuple[str, bytes], pages: PageIds, parent: _Entry) -> _Entry:
        now = self._clock()
        depth = parent.num_pages * self._page_size
        stats = NodeStats(now, now, tokens=len(pages) * self._page_size, depth=depth)
        entry = self._table[whole] = _Entry(next(self._entry_ids), parent, whole, pages, stats)
        parent.num_children += 1
        self._lengths[entry.num_pages] += 1
        self._evictable_pages += len(pages)
        self._version += 1
        return entry

    def lock(self, handle: PrefixHandle) -> None:
        """Protect an entry, and the entries that it continues, until `unlock`."""
        entry = self._own(handle)
        entry.num_holds += 1
        for step in entry.back_to(self._start) or []:
            if step.num_locks == 0:
                self._evictable_pages -= len(step.pages)
                self._locked_pages += len(step.pages)
            step.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the entry is not locked.
        """
        entry = self._own(handle)
        if entry.num_holds == 0:
            raise InvariantError("prefix table: unlock without a lock. Unlock a handle as often as it was locked.")
        entry.num_holds -= 1
        for step in entry.back_to(self._start) or []:
            step.num_locks -= 1
            if step.num_locks == 0:
                self._evictable_pages += len(step.pages)
                self._locked_pages -= len(step.pages)

    def evict(self, num_pages: int) -> PageIds:
        """Evict the least recently used entries. An entry is evicted only after the entries that continue it."""
        gone: list[_Entry] = []
        while sum(len(entry.pages) for entry in gone) < num_pages:
            ends = [entry for entry in self._table.values() if not entry.num_children and not entry.num_locks]
            if not ends:
                break
            gone.append(min(ends, key=lambda entry: entry.stats.last_access))
            self._drop(gone[-1])
        return _join(gone)

    def reset(self) -> PageIds:
        """Remove every entry that is not locked."""
        gone = [entry for entry in reversed(self._table.values()) if not entry.num_locks]  # children first
        for entry in gone:
            self._drop(entry)
        return _join(gone)

    def _drop(self, entry: _Entry) -> None:
        assert entry.parent is not None, "the start is in no table"
        del self._table[entry.key]
        entry.parent.num_children -= 1
        self._lengths[entry.num_pages] -= 1
        if not self._lengths[entry.num_pages]:
            del self._lengths[entry.num_pages]
        self._evictable_pages -= len(entry.pages)
        self._version += 1

    @property
    def evictable_pages(self) -> int:
        """Number of pages of entries that are not locked."""
        return self._evictable_pages

    @property
    def locked_pages(self) -> int:
        """Number of pages of locked entries."""
        return self._locked_pages

    @property
    def version(self) -> int:
        """Version of the content, which grows when an entry is added or removed."""
        return self._version

    def walk(self) -> Iterator[NodeView]:
        """Yield every entry, parents before their children."""
        for entry in self._table.values():
            assert entry.parent is not None, "the start is in no table"
            own = slice(entry.parent.num_pages * self._page_size, None)
            yield NodeView(
                node_id=entry.entry_id,
                parent_id=None if entry.parent is self._start else entry.parent.entry_id,
                namespace=entry.key[0],
                token_ids=np.frombuffer(entry.key[1], dtype=np.int32)[own],
                pages=entry.pages,
                num_locks=entry.num_locks,
                stats=entry.stats,
            )

    @staticmethod
    def _own(handle: PrefixHandle) -> _Entry:
        if not isinstance(handle, _Entry):
            raise InvariantError(f"prefix table: a {type(handle).__name__} is no handle of this cache.")
        return handle


def _join(entries: list[_Entry]) -> PageIds:
    return np.concatenate([entry.pages for entry in entries]) if entries else NO_PAGES


class TablePlugin:
    """A plugin that provides the table as `whole_prefix_table`."""

    @hookimpl
    def provide_prefix_caches(self) -> list[Provider[PrefixCache]]:
        """Return the provider of the table."""

        def create(options: NoOptions, context: CacheContext) -> PrefixCache:
            return WholePrefixTable(context)

        return [
            Provider(
                name="whole_prefix_table",
                summary="Keeps whole prefixes in a table, and shares no part of one",
                api_version=1,
                create=create,
                capabilities=CacheCapabilities(reuses=True),
            )
        ]
