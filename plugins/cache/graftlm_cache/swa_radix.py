"""The radix prefix cache for models with sliding windows: a page may stay when its window page has gone."""

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
    """The answer of a probe while the tree was in this version."""

    num_pages: int
    version: int


class SWARadixCache(RadixCache):
    """A radix cache that knows which of its nodes have window pages.

    A node is covered, with a window page for each of its pages, or bare. A match ends where the `reach_pages` pages in
    front of it are covered, or all are:

        reach_pages = 4          [==== 8 ====]──[---- 16 ----]──[== 3 ==]──[== 2 ==]      = covered  - bare
        pages                    0           8               24         27         29
        a match may end at       0 ....... 8                                28, 29

    So a long prompt comes to cost one window at its end, and another at each place where prompts branch off. Window
    pages go in the order in which windows were last used, first those in front of the last window of a run. A leaf
    without a window leaves the cache as a whole, and with it what no match can end in any more.

    Args:
        window: tells which pages have window pages.
    """

    def __init__(self, context: CacheContext, window: WindowView) -> None:
        super().__init__(context)
        self._window = window
        self._reach = window.reach_pages
        self._cover = WindowCover()
        self._left_bare: list[RadixNode] = []  # nodes that lost their last child, and have no window pages

    # -- Looking up and adding ------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix that a request can go on from; see `PrefixCache.match`.

        Raises:
            InvariantError: `resume` is void, or the key is malformed.
        """
        start = self._start(resume, key.namespace)
        num_pages = self._usable_pages(start, self._whole_pages(key))
        return super().match(replace(key, token_ids=key.token_ids[: num_pages * self._page_size]), resume)

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages a match would find, changing nothing."""
        root = self._roots.get(key.namespace)
        return 0 if root is None else self._usable_pages(root, self._whole_pages(key))

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Return where a match would end; O(1) when nothing changed, else from the start.

        Window pages may have gone in front of any place, so an old answer is no place to go on from.
        """
        if isinstance(place, _Probed) and place.version == self._version:
            return place
        num_pages = self.probe(key)
        return _Probed(num_pages, self._version) if num_pages else None

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Take the pages the tree does not hold yet, and the window pages it lacks; see `PrefixCache.insert`.

        Raises:
            InvariantError: `handle` is void, or the number of pages does not fit the key.
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
        """Cover a bare node where it is offered window pages, split into parts that are covered or bare.

        Args:
            held: bool [num_own_pages], whether a window page is offered.
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
        """Return how many pages of a key a match from `node` on could use, changing nothing.

        `node` is the end of a match, or of something a request has computed, and can be used itself.
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
        """Return how many pages in a row, up to the node's end, are covered; counting stops at `reach_pages`."""
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
        """Keep the window pages of the last `num_pages` pages before a handle; splits the run where they begin.

        Raises:
            InvariantError: the handle is void.
        """
        for node in self._last_pages(self._own(handle), num_pages):
            self._cover.lock(node)

    def _last_pages(self, end: RadixNode, num_pages: int) -> Iterator[RadixNode]:
        """Yield the nodes of just the last `num_pages` pages up to a node's end; splits the run where they begin."""
        first = max(end.num_pages - num_pages, 0)
        for node in _path_up(end, first):
            in_front = first - (node.num_pages - node.num_own_pages)
            if in_front > 0:
                self._split(node, in_front)
            yield node

    def unlock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Undo one `lock_window` of the same handle and length.

        Raises:
            InvariantError: the handle is void, or its window is not locked.
        """
        self._cover.tick()
        for node in _path_up(self._own(handle), handle.num_pages - num_pages):
            self._cover.unlock(node)

    # -- Giving up pages ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> PageIds:
        """Give up whole leaves, lowest priority first, and what they leave behind without a window.

        Returns: int32, the page ids given up.
        """
        pages = super().evict(num_pages)
        bare = self._drop_left_bare()
        return np.concatenate((pages, join_pages(bare))) if bare else pages

    def reset(self) -> PageIds:
        """Forget everything that is not locked, pinned or not.

        Returns: int32, the page ids given up.
        """
        pages = super().reset()
        self._left_bare.clear()
        return pages

    @property
    def evictable_window_pages(self) -> int:
        """Window pages `evict_window` could make free now."""
        return self._cover.evictable_pages

    def evict_window(self, num_pages: int) -> WindowEviction:
        """Give up window pages, those first whose window was used longest ago.

        Of a run longer than a window, the part in front of its last window goes first. A leaf without a window is of no
        use, so it leaves the cache. Pinned prefixes keep their last window while anything else can go.
        """
        self._end_pins(self._clock())
        spared = {node for end in self._pins.nodes() for node in self._last_pages(end, self._reach)}
        gone: list[bytes] = []
        stripped: list[bytes] = []
        num_free = 0
        while num_free < num_pages and (node := self._cover.oldest(spared)) is not None:
            if node.num_own_pages > self._reach > 0:
                node = self._split(node, node.num_own_pages - self._reach)
            num_free += node.num_own_pages
            if node.is_evictable_leaf and self._reach:
                gone += [node.pages]
                self._drop(node)
                gone += self._drop_left_bare()
            else:
                self._cover.remove(node)
                stripped.append(node.pages)
        self._version += 1
        return WindowEviction(join_pages(gone), join_pages(stripped))

    def _drop(self, leaf: RadixNode) -> None:
        """Take an unlocked leaf out of the tree and out of the order of eviction, and tell of it."""
        self._leaves.discard(leaf)
        self._cut_off(leaf)
        if self._on_event is not None:
            self._on_event(removed_event(leaf))

    def _drop_left_bare(self) -> list[bytes]:
        """Take out the bare nodes that have become leaves: no match can end there. Returns their pages."""
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
    """Yield the node and those above it that end past the first `num_pages` pages of the prompt."""
    while node.num_pages > num_pages and (parent := node.parent) is not None:
        yield node
        node = parent
