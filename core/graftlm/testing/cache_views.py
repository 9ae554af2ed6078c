"""Wrappers of prefix caches for the conformance kits: one overwrites passed arrays, one groups pages into blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from graftlm.contracts import (
    InsertResult,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
    WindowEviction,
)
from graftlm.types import PageIds, TokenIds

__all__ = ["BlockView", "LentArrays"]

#: First page id of a trailing partial block, which a cache of whole blocks does not take.
_PARTIAL_BLOCK = 1 << 30


class LentArrays(PrefixCache):
    """A wrapper that passes copies of arrays to a cache, and overwrites the copies when the call returns.

    If a cache stores such an array or a view of it, the cache's tokens and pages become wrong.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Match a copy of the key."""
        lent = _copied(key)
        match = self._cache.match(lent, resume)
        _overwrite(lent)
        return match

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Insert copies of the key and the pages. The result's pages are copied too: they may be the passed array."""
        lent, lent_pages = _copied(key), pages.copy()
        result = self._cache.insert(lent, lent_pages, handle)
        result = replace(result, pages=result.pages.copy() if isinstance(result.pages, np.ndarray) else result.pages)
        _overwrite(lent)
        lent_pages.fill(-1)
        return result

    def lock(self, handle: PrefixHandle) -> None:
        """Lock a handle."""
        self._cache.lock(handle)

    def unlock(self, handle: PrefixHandle) -> None:
        """Unlock a handle."""
        self._cache.unlock(handle)

    def evict(self, num_pages: int) -> PageIds:
        """Evict pages."""
        return self._cache.evict(num_pages)

    def reset(self) -> PageIds:
        """Reset the cache."""
        return self._cache.reset()

    @property
    def evictable_pages(self) -> int:
        """Number of evictable pages of the cache."""
        return self._cache.evictable_pages

    @property
    def locked_pages(self) -> int:
        """Number of locked pages of the cache."""
        return self._cache.locked_pages

    @property
    def eviction_age_s(self) -> float | None:
        """The cache's `eviction_age_s`."""
        return self._cache.eviction_age_s

    def walk(self) -> Iterator[NodeView]:
        """Yield the cache's nodes."""
        return self._cache.walk()

    @property
    def version(self) -> int:
        """The cache's `version`."""
        return self._cache.version

    def probe(self, key: PrefixKey) -> int:
        """Probe a copy of the key."""
        lent = _copied(key)
        num_pages = self._cache.probe(lent)
        _overwrite(lent)
        return num_pages

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Probe a copy of the key again."""
        lent = _copied(key)
        found = self._cache.probe_again(lent, place)
        _overwrite(lent)
        return found

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return a copy of the continuation of a copy of the key; a continuation may be a view of the passed key."""
        lent = _copied(key)
        found = self._cache.continuation(lent, num_tokens)
        found = found.copy() if isinstance(found, np.ndarray) else found
        _overwrite(lent)
        return found

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Pin a copy of the key."""
        lent = _copied(key)
        num_pages = self._cache.pin(lent, ttl_s)
        _overwrite(lent)
        return num_pages

    def unpin(self, key: PrefixKey) -> bool:
        """Unpin a copy of the key."""
        lent = _copied(key)
        was_pinned = self._cache.unpin(lent)
        _overwrite(lent)
        return was_pinned

    @property
    def evictable_window_pages(self) -> int:
        """Number of evictable window pages of the cache."""
        return self._cache.evictable_window_pages

    def lock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Lock a window."""
        self._cache.lock_window(handle, num_pages)

    def unlock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Unlock a window."""
        self._cache.unlock_window(handle, num_pages)

    def evict_window(self, num_pages: int) -> WindowEviction:
        """Evict window pages."""
        return self._cache.evict_window(num_pages)


@dataclass(slots=True, eq=False)
class _BlockPlace:
    """A handle or a probe's place that counts blocks instead of pages."""

    inner: PrefixHandle | ProbePlace
    block_pages: int

    @property
    def num_pages(self) -> int:
        return _num_blocks(self.inner.num_pages, self.block_pages, "a place in the cache")


class BlockView(PrefixCache):
    """A wrapper of a cache that shares prefixes in blocks; the pages of the wrapper are these blocks.

    Block b consists of pages b * block_pages to (b + 1) * block_pages - 1. The wrapper raises AssertionError if the
    cache shares, takes or evicts a part of a block.

        cache's pages    0 1 2 3 | 4 5 6 7 | 8 9        block_pages = 4
        view's pages     0       | 1       | partial: the caller's
    """

    def __init__(self, cache: PrefixCache, block_pages: int, page_size: int) -> None:
        self._cache = cache
        self._block_pages = block_pages
        self._page_size = page_size

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Match a key, and check that the result has whole blocks."""
        match = self._cache.match(key, None if resume is None else self._inner(resume))
        return PrefixMatch(self._outer(match.handle), self._blocks(match.pages))

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Insert whole blocks, and the whole pages of a trailing partial block; the cache must not take these."""
        inner = self._inner(handle)
        num_partial = len(key.token_ids) // self._page_size % self._block_pages
        partial = np.arange(_PARTIAL_BLOCK, _PARTIAL_BLOCK + num_partial, dtype=np.int32)
        result = self._cache.insert(key, np.concatenate([self._pages(pages), partial]), inner)
        return InsertResult(
            existing_pages=self._num_blocks(result.existing_pages, "existing_pages"),
            cached_pages=self._num_blocks(result.cached_pages, "cached_pages"),
            handle=self._outer(result.handle),
            pages=self._blocks(result.pages),
        )

    def lock(self, handle: PrefixHandle) -> None:
        """Lock a handle."""
        self._cache.lock(self._inner(handle))

    def unlock(self, handle: PrefixHandle) -> None:
        """Unlock a handle."""
        self._cache.unlock(self._inner(handle))

    def evict(self, num_pages: int) -> PageIds:
        """Evict at least `num_pages` blocks."""
        return self._blocks(_ordered(self._cache.evict(num_pages * self._block_pages), self._block_pages))

    def reset(self) -> PageIds:
        """Reset the cache."""
        return self._blocks(_ordered(self._cache.reset(), self._block_pages))

    @property
    def evictable_pages(self) -> int:
        """Number of evictable blocks."""
        return self._num_blocks(self._cache.evictable_pages, "evictable_pages")

    @property
    def locked_pages(self) -> int:
        """Number of locked blocks."""
        return self._num_blocks(self._cache.locked_pages, "locked_pages")

    @property
    def eviction_age_s(self) -> float | None:
        """The cache's `eviction_age_s`."""
        return self._cache.eviction_age_s

    def walk(self) -> Iterator[NodeView]:
        """Yield the cache's nodes, with blocks in place of pages."""
        for view in self._cache.walk():
            yield replace(view, pages=self._blocks(view.pages))

    @property
    def version(self) -> int:
        """The cache's `version`."""
        return self._cache.version

    def probe(self, key: PrefixKey) -> int:
        """Return the number of blocks that a match would find."""
        return self._num_blocks(self._cache.probe(key), "the result of probe()")

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Probe again, with the place counted in blocks."""
        found = self._cache.probe_again(key, None if place is None else self._inner(place))
        return None if found is None else self._outer(found)

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return the cache's continuation of the key."""
        return self._cache.continuation(key, num_tokens)

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Pin a key, and return the number of pinned blocks."""
        return self._num_blocks(self._cache.pin(key, ttl_s), "the result of pin()")

    def unpin(self, key: PrefixKey) -> bool:
        """Unpin a key."""
        return self._cache.unpin(key)

    def _num_blocks(self, num_pages: int, what: str) -> int:
        return _num_blocks(num_pages, self._block_pages, what)

    def _outer(self, place: PrefixHandle | ProbePlace) -> _BlockPlace:
        return _BlockPlace(place, self._block_pages)

    def _inner(self, place: PrefixHandle | ProbePlace) -> PrefixHandle | ProbePlace:
        assert isinstance(place, _BlockPlace), "the kit uses a handle of another cache"
        return place.inner

    def _pages(self, blocks: PageIds) -> PageIds:
        """Return the page ids of blocks."""
        offsets = np.arange(self._block_pages, dtype=np.int32)
        return (blocks[:, None] * np.int32(self._block_pages) + offsets).ravel()

    def _blocks(self, pages: PageIds) -> PageIds:
        """Return the blocks that pages form, in the same order; check that the pages are whole blocks."""
        self._num_blocks(len(pages), "a number of pages")
        blocks = pages[:: self._block_pages] // np.int32(self._block_pages)
        assert np.array_equal(pages, self._pages(blocks)), f"pages {pages.tolist()} are not whole blocks"
        return blocks


def _ordered(pages: PageIds, block_pages: int) -> PageIds:
    """Sort evicted pages by block, because a cache may return the pages of a block in any order."""
    _, first_idx, block_of = np.unique(pages // np.int32(block_pages), return_index=True, return_inverse=True)
    return pages[np.lexsort((pages, first_idx[block_of]))]


def _num_blocks(num_pages: int, block_pages: int, what: str) -> int:
    assert num_pages % block_pages == 0, (
        f"{what} is {num_pages}, expected a multiple of {block_pages} pages, the kit's granularity_tokens"
    )
    return num_pages // block_pages


def _copied(key: PrefixKey) -> PrefixKey:
    return replace(key, token_ids=key.token_ids.copy())


def _overwrite(key: PrefixKey) -> None:
    np.invert(key.token_ids, out=key.token_ids)
