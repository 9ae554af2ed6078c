"""The radix prefix cache for models with sliding windows: a page may stay cached after its window page is freed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import (
    CacheContext,
    InsertResult,
    NodeView,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
    WindowEviction,
    WindowView,
)
from graftlm.types import PageIds
from graftlm_cache.events import removed_event
from graftlm_cache.node import RadixNode, common_pages, join_pages
from graftlm_cache.radix import RadixCache
from graftlm_cache.window_cover import WindowCover

__all__ = ["SWARadixCache"]


@dataclass(frozen=True, slots=True)
class _Probed:
    """The result of a probe, valid for this version of the tree."""

    num_pages: int
    version: int


class SWARadixCache(RadixCache):
    """A radix cache that records which of its nodes have window pages.

    A node is either covered (each of its pages has a window page) or bare (none has one). A match can end at a place if
    the last `reach_pages` pages before it are covered; if there are fewer pages, all of them must be covered:

        reach_pages = 4          [==== 8 ====]──[---- 16 ----]──[== 3 ==]──[== 2 ==]      = covered  - bare
        pages                    0           8               24         27         29
        a match may end at       0 ....... 8                                28, 29

    So under memory pressure a long prompt keeps one window at its end, and one at each place where prompts branch. The
    least recently used windows are evicted first; within a run, the pages before its last window are evicted first. A
    leaf without a window is removed from the cache, together with the ancestors at which no match can end any more.

    Args:
        context: see `CacheContext`.
        window: view of the window memory; the cache reads from it which pages have window pages.
    """

    def __init__(self, context: CacheContext, window: WindowView) -> None:
        super().__init__(context)
        self._window = window
        self._reach = window.reach_pages
        self._cover = WindowCover()
        self._left_bare: list[RadixNode] = []  # nodes that lost their last child, and have no window pages

    # -- Looking up and adding ------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix from which a request can continue; see `PrefixCache.match`.

        Raises:
            InvariantError: `resume` is invalid, or the key is malformed.
        """
        start = self._start(resume, key.namespace)
        num_pages = self._usable_pages(start, self._whole_pages(key))
        return super().match(replace(key, token_ids=key.token_ids[: num_pages * self._page_size]), resume)

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find; change nothing."""
        root = self._roots.get(key.namespace)
        return 0 if root is None else self._usable_pages(root, self._whole_pages(key))

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Return where a match would end: in O(1) if nothing changed, otherwise by a probe from the start.

        The probe cannot continue from an old result, because window pages before that place may have been freed.
        """
        if isinstance(place, _Probed) and place.version == self._version:
            return place
        num_pages = self.probe(key)
        return _Probed(num_pages, self._version) if num_pages else None

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Add the pages and the window pages that the tree does not have yet; see `PrefixCache.insert`.

        Raises:
            InvariantError: `handle` is invalid, or the number of pages does not fit the key.
        """
        start = handle.num_pages
        result = super().insert(key, pages, handle)
        held = self._window.holds(pages)
        self._cover.tick()
        for node in reversed(list(_path_up(self._own(result.handle), start))):
            if node not in self._cover:
                first = node.num_pages - node.num_own_pages - start
                self._take_over(node, held[first : first + node.num_own_pages])
        return result

    def _take_over(self, node: RadixNode, held: NDArray[np.bool_]) -> None:
        """Add the offered window pages to a bare node, and split the node into covered and bare parts.

        Args:
            node: a bare node.
            held: bool [num_own_pages], whether a window page is offered for each page.
        """
        if not held.any():
            return
        first = 0
        for cut in (np.flatnonzero(held[1:] != held[:-1]) + 1).tolist():
            upper = self._split(node, cut - first)
            if held[first]:
                self._cover.add(upper)
            first = cut
        if held[first]:
            self._cover.add(node)
        self._version += 1

    def _usable_pages(self, node: RadixNode, tokens: bytes) -> int:
        """Return the number of pages of a key that a match from `node` on could use; change nothing.

        `node` is the end of a match or of a request's computed tokens, so its own pages can be used.
        """
        page_bytes, reach = self._page_bytes, self._reach
        usable = end = node.num_pages
        num_covered = self._covered_before(node)
        offset = end * page_bytes
        while (child := node.children.get(tokens[offset : offset + page_bytes])) is not None:
            is_whole = tokens.startswith(child.run, offset)
            shared = child.num_own_pages if is_whole else common_pages(child.run, tokens, offset, page_bytes)
            end += shared
            num_covered = num_covered + shared if child in self._cover else 0
            if num_covered >= min(reach, end):
                usable = end
            if not is_whole:
                break
            offset += len(child.run)
            node = child
        return usable

    def _covered_before(self, node: RadixNode) -> int:
        """Return the number of consecutive covered pages before the node's end; may stop counting at `reach_pages`."""
        num_covered = 0
        while num_covered < self._reach and node in self._cover and (parent := node.parent) is not None:
            num_covered += node.num_own_pages
            node = parent
        return num_covered

    def _split(self, lower: RadixNode, num_upper_pages: int) -> RadixNode:
        upper = super()._split(lower, num_upper_pages)
        self._cover.split(upper, lower)
        return upper

    # -- Window locks ---------------------------------------------------------------------------------------------

    def lock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Protect the window pages of the last `num_pages` pages before a handle; split the run where they start.

        Raises:
            InvariantError: the handle is invalid.
        """
        for node in self._last_pages(self._own(handle), num_pages):
            self._cover.lock(node)

    def _last_pages(self, end: RadixNode, num_pages: int) -> Iterator[RadixNode]:
        """Yield the nodes of exactly the last `num_pages` pages before a node's end; split the run where they start."""
        first = max(end.num_pages - num_pages, 0)
        for node in _path_up(end, first):
            in_front = first - (node.num_pages - node.num_own_pages)
            if in_front > 0:
                self._split(node, in_front)
            yield node

    def unlock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Undo one `lock_window` of the same handle and length.

        Raises:
            InvariantError: the handle is invalid, or its window is not locked.
        """
        self._cover.tick()
        for node in _path_up(self._own(handle), handle.num_pages - num_pages):
            self._cover.unlock(node)

    # -- Evicting pages -------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> PageIds:
        """Evict whole leaves, lowest priority first, and the bare nodes that thereby become leaves.

        Returns: int32, the evicted page ids.
        """
        pages = super().evict(num_pages)
        bare = self._drop_left_bare()
        return np.concatenate((pages, join_pages(bare))) if bare else pages

    def reset(self) -> PageIds:
        """Remove all nodes that are not locked, including pinned ones.

        Returns: int32, the removed page ids.
        """
        pages = super().reset()
        self._left_bare.clear()
        return pages

    @property
    def evictable_window_pages(self) -> int:
        """Number of window pages that `evict_window` could free now."""
        return self._cover.evictable_pages

    def evict_window(self, num_pages: int) -> WindowEviction:
        """Evict window pages, least recently used windows first.

        If a run is longer than a window, the part before its last window is evicted first. A leaf without a window
        cannot be used, so it is removed from the cache. The last windows of pinned prefixes are evicted last.
        """
        self._end_pins(self._clock())
        pinned = {node for end in self._pins.nodes() for node in self._last_pages(end, self._reach)}
        removed: list[bytes] = []
        bared: list[bytes] = []
        num_free = 0
        while num_free < num_pages and (node := self._cover.oldest(pinned)) is not None:
            if node.num_own_pages > self._reach > 0:
                node = self._split(node, node.num_own_pages - self._reach)
            num_free += node.num_own_pages
            if node.is_evictable_leaf and self._reach:
                removed += [node.pages]
                self._drop(node)
                removed += self._drop_left_bare()
            else:
                self._cover.remove(node)
                bared.append(node.pages)
        self._version += 1
        return WindowEviction(join_pages(removed), join_pages(bared))

    def _drop(self, leaf: RadixNode) -> None:
        """Remove an unlocked leaf from the tree and from the order of eviction, and report the event."""
        self._leaves.discard(leaf)
        self._cut_off(leaf)
        if self._on_event is not None:
            self._on_event(removed_event(leaf))

    def _drop_left_bare(self) -> list[bytes]:
        """Remove the bare nodes that have become leaves, because no match can end there. Return their pages."""
        dropped = []
        while self._left_bare:
            node = self._left_bare.pop()
            if node.is_evictable_leaf:
                self._drop(node)
                dropped.append(node.pages)
        return dropped

    def _cut_off(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        super()._cut_off(leaf)
        self._cover.remove(leaf)
        if parent is not None and parent.is_evictable_leaf and parent not in self._cover and self._reach:
            self._left_bare.append(parent)

    # -- Reading --------------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children. The cache must not change meanwhile; the arrays are read-only."""
        for node, view in zip(self._nodes(), super().walk(), strict=True):
            yield replace(view, has_window=node in self._cover)


def _path_up(node: RadixNode, num_pages: int) -> Iterator[RadixNode]:
    """Yield the node and its ancestors that end after the first `num_pages` pages of the prompt."""
    while node.num_pages > num_pages and (parent := node.parent) is not None:
        yield node
        node = parent
