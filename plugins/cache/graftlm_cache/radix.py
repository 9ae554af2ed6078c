"""The radix prefix cache: a tree of token runs, shared by all requests with a common prefix.

The design follows RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
arXiv:2312.07104, section 3).

    root("") ── [system prompt] ─┬─ [question 1] ── [answer 1]
                                 └─ [question 2]                  each run is whole pages
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from graftlm.contracts import (
    NO_PAGES,
    CacheContext,
    EvictionStrategy,
    InsertResult,
    NodeStats,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
)
from graftlm.errors import InvariantError
from graftlm.records import CacheEvent
from graftlm.types import PageIds, TokenIds
from graftlm_cache.continuation import NO_TOKENS, find_continuation
from graftlm_cache.events import parent_id, removed_event, split_event, stored_event
from graftlm_cache.leaf_heap import LeafHeap
from graftlm_cache.node import ITEM_BYTES, RadixNode, common_pages, join_pages
from graftlm_cache.pins import Pins
from graftlm_cache.place import Place, find_place

__all__ = ["RadixCache"]

logger = logging.getLogger(__name__)

_TOKEN_DTYPE = np.dtype(np.int32)


class RadixCache(PrefixCache):
    """A prefix cache with a radix tree per namespace. Eviction removes whole leaves.

    A handle is the node at which a match ends. If a match ends within a node's run, the run is split there, at a page
    boundary. The old node becomes the lower part, so handles on it stay valid.
    """

    def __init__(self, context: CacheContext) -> None:
        self._page_bytes = context.page_size * ITEM_BYTES
        self._page_size = context.page_size
        self._clock = context.clock
        self._on_event = context.on_event
        # None for hooks that the strategy does not override, so that they cost no time.
        self._on_insert, self._on_hit, self._on_evict = _hooks(context.eviction)
        self._roots: dict[str, RadixNode] = {}  # namespace -> root; only roots with children
        self._leaves = LeafHeap(context.eviction)
        self._pins = Pins()
        self._node_ids = itertools.count()
        self._evictable_pages = 0
        self._locked_pages = 0
        self._eviction_age_s: float | None = None
        self._version = 0

    # -- Looking up and adding ------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix; see `PrefixCache.match`.

        Raises:
            InvariantError: `resume` is invalid, or the key is malformed.
        """
        start = self._start(resume, key.namespace)
        path = self._path(start, self._whole_pages(key), key.priority, self._clock())
        on_hit = self._on_hit
        for node in path:
            node.stats.hits += 1
            if on_hit is not None:
                on_hit(node.stats)
        return PrefixMatch(path[-1] if path else start, join_pages([node.pages for node in path]))

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find; change nothing."""
        root = self._roots.get(key.namespace)
        return 0 if root is None else find_place(root, self._whole_pages(key), self._page_bytes).num_pages

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Return where a match would end; see `PrefixCache.probe_again`. O(1) if nothing changed at that place."""
        if isinstance(place, Place):
            node = place.node
            # Start from the root if the node was evicted, or is a root that was removed with its last child.
            if node.parent is not None or self._roots.get(key.namespace) is node:
                return place if place.is_current else find_place(node, self._whole_pages(key), self._page_bytes)
        root = self._roots.get(key.namespace)
        return None if root is None else find_place(root, self._whole_pages(key), self._page_bytes)

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return tokens that follow a key in the tree; see `PrefixCache.continuation`."""
        root = self._roots.get(key.namespace)
        if root is None:
            return NO_TOKENS
        return find_continuation(root, key.token_ids.tobytes(), num_tokens, self._page_bytes)

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Add the pages that the tree does not have yet; see `PrefixCache.insert`.

        Raises:
            InvariantError: `handle` is invalid, or the number of pages does not fit the key.
        """
        tokens = self._whole_pages(key)
        start = self._start(handle, key.namespace)
        self._check_offer(tokens, pages, start)
        now = self._clock()
        path = self._path(start, tokens, key.priority, now)
        end = path[-1] if path else start
        existing_pages = end.num_pages
        if existing_pages * self._page_bytes < len(tokens):
            end = self._grow(end, tokens, pages[existing_pages - start.num_pages :].tobytes(), key.priority, now)
            path.append(end)
        self._leaves.settle_many()
        held = pages if existing_pages == start.num_pages else join_pages([node.pages for node in path])
        return InsertResult(existing_pages, end.num_pages, end, held)

    def _path(self, node: RadixNode, tokens: bytes, priority: int, now: float) -> list[RadixNode]:
        """Return the nodes below `node` on the key's longest cached prefix.

        Effects: updates the recency of these nodes. Splits the last node if the key matches only a part of its run.
        """
        page_bytes, end = self._page_bytes, len(tokens)
        offset = node.num_pages * page_bytes
        path: list[RadixNode] = []
        while offset < end:
            child = node.children.get(tokens[offset : offset + page_bytes])
            if child is None:
                break
            if not tokens.startswith(child.run, offset):
                child = self._split(child, common_pages(child.run, tokens, offset, page_bytes))
                end = 0  # ends the loop: the remaining tokens are not in the tree
            stats = child.stats
            stats.last_access = now
            if priority > stats.priority:
                stats.priority = priority
            if not child.children and not child.num_locks:
                self._leaves.touch(child)
            path.append(child)
            offset += len(child.run)
            node = child
        return path

    def _grow(self, parent: RadixNode, tokens: bytes, pages: bytes, priority: int, now: float) -> RadixNode:
        """Add a leaf with the key's remaining pages below a node; return it."""
        offset = parent.num_pages * self._page_bytes
        run = tokens[offset:]
        stats = NodeStats(now, now, 0, len(run) // ITEM_BYTES, offset // ITEM_BYTES, priority)
        leaf = RadixNode(next(self._node_ids), parent.namespace, parent, run, pages, stats)
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        parent.adopt(run[: self._page_bytes], leaf)
        self._leaves.discard(parent)
        self._leaves.touch(leaf)
        self._evictable_pages += leaf.num_own_pages
        self._version += 1
        if self._on_insert is not None:
            self._on_insert(stats)
        if self._on_event is not None:
            self._on_event(stored_event(leaf))
        return leaf

    def _split(self, lower: RadixNode, num_upper_pages: int) -> RadixNode:
        """Move the upper part of a node's run to a new node above it; return the new node."""
        cut = num_upper_pages * self._page_bytes
        run, pages, parent = lower.run, lower.pages, lower.parent
        upper = RadixNode(
            next(self._node_ids),
            lower.namespace,
            parent,
            run[:cut],
            pages[: num_upper_pages * ITEM_BYTES],
            replace(lower.stats, tokens=cut // ITEM_BYTES),
        )
        upper.num_locks = lower.num_locks
        assert parent is not None, "a root has no run to split"
        parent.adopt(run[: self._page_bytes], upper)
        upper.adopt(run[cut : cut + self._page_bytes], lower)
        lower.parent = upper
        lower.run = run[cut:]
        lower.pages = pages[num_upper_pages * ITEM_BYTES :]
        lower.num_own_pages -= num_upper_pages
        lower.stats.tokens -= cut // ITEM_BYTES
        lower.stats.depth += cut // ITEM_BYTES
        if lower.is_evictable_leaf:
            self._leaves.touch(lower)
        if self._on_insert is not None:
            self._on_insert(upper.stats)
        if self._on_event is not None:
            self._on_event(split_event(upper, lower))
        return upper

    # -- Locks and pins -------------------------------------------------------------------------------------------

    def lock(self, handle: PrefixHandle) -> None:
        """Protect the path to a handle from eviction until `unlock`.

        Raises:
            InvariantError: the handle is invalid.
        """
        node = self._own(handle)
        node.num_holds += 1
        while (parent := node.parent) is not None:
            if node.num_locks == 0:
                self._evictable_pages -= node.num_own_pages
                self._locked_pages += node.num_own_pages
                if node.heap_stamp is not None:
                    self._leaves.discard(node)
            node.num_locks += 1
            node = parent

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the handle is invalid or not locked.
        """
        node = self._own(handle)
        if node.num_holds == 0:
            raise InvariantError(
                f"radix cache: unlock of a handle at page {node.num_pages} that is not locked. "
                "Unlock a handle as often as it was locked."
            )
        node.num_holds -= 1
        while (parent := node.parent) is not None:
            node.num_locks -= 1
            if node.num_locks == 0:
                self._evictable_pages += node.num_own_pages
                self._locked_pages -= node.num_own_pages
                if not node.children:
                    self._leaves.touch(node)
            node = parent
        self._leaves.settle_many()

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Pin the cached part of a key for `ttl_s` seconds; see `PrefixCache.pin`."""
        tokens, now = self._whole_pages(key), self._clock()
        self._end_pins(now)
        if not self._pins.has_room(key.namespace, tokens):
            logger.warning("a prefix was not pinned, because the maximum of %d pins is reached", len(self._pins))
            return 0
        path = self._path(self._start(None, key.namespace), tokens, key.priority, now)
        if not path:
            return 0
        previous = self._pins.add(key.namespace, tokens, path[-1], now + ttl_s)
        for node in (previous, path[-1]):
            self._reconsider(node)
        return path[-1].num_pages

    def unpin(self, key: PrefixKey) -> bool:
        """End a pin early; see `PrefixCache.unpin`."""
        self._end_pins(self._clock())
        node = self._pins.remove(key.namespace, self._whole_pages(key))
        self._reconsider(node)
        return node is not None

    def _reconsider(self, node: RadixNode | None) -> None:
        """Update a leaf's position in the order of eviction, because its pins have changed."""
        if node is not None and node.is_evictable_leaf:
            self._leaves.touch(node)

    # -- Evicting pages -------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> PageIds:
        """Evict whole leaves, lowest priority first, until `num_pages` or more pages are evicted or no leaf is left.

        Returns: int32, the evicted page ids.
        """
        now = self._clock()
        self._end_pins(now)
        evicted: list[bytes] = []
        num_evicted = 0
        while num_evicted < num_pages and (leaf := self._next_leaf()) is not None:
            self._cut_off(leaf)
            evicted.append(leaf.pages)
            num_evicted += leaf.num_own_pages
            last_used_s = leaf.stats.last_access
            if self._on_event is not None:
                self._on_event(removed_event(leaf))
        if evicted:
            self._eviction_age_s = now - last_used_s
            self._version += 1
        return join_pages(evicted)

    def _end_pins(self, now: float) -> None:
        """End the pins whose end time has passed."""
        while len(self._pins) and (ended := self._pins.pop_ended(now)) is not None:
            self._reconsider(ended)

    def _next_leaf(self) -> RadixNode | None:
        """Remove the next leaf from the order of eviction; if only pinned leaves remain, end the earliest pin."""
        while (leaf := self._leaves.pop()) is None:
            node = self._pins.pop_first()
            if node is None:
                return None
            self._reconsider(node)
        return leaf

    def reset(self) -> PageIds:
        """Remove all nodes that are not locked, including pinned ones.

        Returns: int32, the removed page ids.
        """
        self._pins.clear()
        removed = [node for node in self._nodes() if node.num_locks == 0]
        if not removed:
            return NO_PAGES
        for node in reversed(removed):  # children before parents
            self._leaves.discard(node)
            self._cut_off(node)
            if self._on_event is not None and self._locked_pages:
                self._on_event(removed_event(node))
        self._version += 1
        if self._on_event is not None and not self._locked_pages:
            self._on_event(CacheEvent("cleared", sum(node.stats.tokens for node in removed)))
        return join_pages([node.pages for node in removed])

    def _cut_off(self, leaf: RadixNode) -> None:
        """Remove an unlocked leaf from the tree; its parent may become an evictable leaf."""
        parent = leaf.parent
        assert parent is not None, "a root is never evicted"
        parent.disown(leaf.run[: self._page_bytes])
        leaf.parent = None
        self._evictable_pages -= leaf.num_own_pages
        if self._on_evict is not None:
            self._on_evict(leaf.stats)
        if parent.is_evictable_leaf:
            self._leaves.touch(parent)
        elif parent.parent is None and not parent.children:
            del self._roots[parent.namespace]

    # -- Reading --------------------------------------------------------------------------------------------------

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `evict` could return now."""
        return self._evictable_pages

    @property
    def locked_pages(self) -> int:
        """Number of pages on locked paths."""
        return self._locked_pages

    @property
    def eviction_age_s(self) -> float | None:
        """Seconds between last use and eviction of the last evicted node; None before the first eviction."""
        return self._eviction_age_s

    @property
    def version(self) -> int:
        """A number that increases whenever pages are added or removed."""
        return self._version

    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children. The cache must not change meanwhile; the arrays are read-only."""
        self._end_pins(self._clock())
        for node in self._nodes():
            yield NodeView(
                node_id=node.node_id,
                parent_id=parent_id(node),
                namespace=node.namespace,
                token_ids=node.token_ids,
                pages=node.page_ids,
                num_locks=node.num_locks,
                stats=node.stats,
                num_pins=node.num_pins,
            )

    def _nodes(self) -> Iterator[RadixNode]:
        """Yield every node except the roots, parents before children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    # -- Checking arguments ---------------------------------------------------------------------------------------

    def _start(self, handle: PrefixHandle | None, namespace: str) -> RadixNode:
        """Return the node to continue from: the handle's node, or the root of the namespace.

        A root is removed together with its last child, so a handle without pages refers to the namespace's present
        root. A new root is added to the tree with its first child.

        Raises:
            InvariantError: the handle is invalid or has another namespace.
        """
        if handle is None or handle.num_pages == 0:
            return self._roots.get(namespace) or RadixNode.root(next(self._node_ids), namespace)
        node = self._own(handle)
        if node.namespace != namespace:
            raise InvariantError(
                f"radix cache: a handle of namespace {node.namespace!r} cannot continue a key of {namespace!r}."
            )
        return node

    def _own(self, handle: PrefixHandle) -> RadixNode:
        if not isinstance(handle, RadixNode):
            raise InvariantError(
                f"radix cache: got a handle of type {type(handle).__name__}, expected one that this cache returned."
            )
        if handle.parent is None and handle.num_pages:
            raise InvariantError(
                f"radix cache: the handle at page {handle.num_pages} was evicted. Lock a handle to keep it."
            )
        return handle

    def _whole_pages(self, key: PrefixKey) -> bytes:
        """Return the key's tokens as bytes of int32, without a trailing partial page."""
        tokens = key.token_ids
        if tokens.dtype != _TOKEN_DTYPE or tokens.ndim != 1:
            raise InvariantError(f"radix cache: expected int32 token ids [n], got {tokens.dtype} {list(tokens.shape)}.")
        if self._page_size > 1 and (rest := len(tokens) % self._page_size):
            tokens = tokens[:-rest]
        return tokens.tobytes()

    def _check_offer(self, tokens: bytes, pages: PageIds, start: RadixNode) -> None:
        expected = len(tokens) // self._page_bytes - start.num_pages
        if len(pages) != expected or pages.dtype != np.int32:
            raise InvariantError(
                f"radix cache: got {len(pages)} pages of {pages.dtype} for a key of {len(tokens) // ITEM_BYTES} "
                f"whole-page tokens from page {start.num_pages} on, expected {expected} pages of {self._page_size} "
                "tokens, int32."
            )


def _hooks(strategy: EvictionStrategy) -> list[Callable[[NodeStats], None] | None]:
    """Return a strategy's on_insert, on_hit and on_evict; None for methods that it does not override."""
    names = ("on_insert", "on_hit", "on_evict")
    is_own = [getattr(type(strategy), name, None) is not getattr(EvictionStrategy, name) for name in names]
    return [getattr(strategy, name) if own else None for name, own in zip(names, is_own, strict=True)]
