"""The radix prefix cache: a tree of token runs, shared by all requests with a common prefix.

After RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
arXiv:2312.07104, section 3).

    root("") ── [system prompt] ─┬─ [question 1] ── [answer 1]
                                 └─ [question 2]                  each run is whole pages
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

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
from graftlm.types import PageIds, TokenIds
from graftlm_cache.leaf_heap import LeafHeap
from graftlm_cache.node import RadixNode, common_len, page_edge, token_edge

__all__ = ["RadixCache"]


class RadixCache(PrefixCache):
    """A prefix cache over a radix tree per namespace. Eviction takes whole leaves.

    A handle is the node where a match ends. When a match ends inside a node's run, the run is split there, at a page
    boundary; the old node becomes the lower part, so handles on it keep their meaning.
    """

    def __init__(self, context: CacheContext) -> None:
        self._page_size = context.page_size
        self._edge_key = token_edge if context.page_size == 1 else page_edge
        self._strategy = context.eviction
        self._clock = context.clock
        self._on_event = context.on_event
        self._roots: dict[str, RadixNode] = {}  # none without children
        self._leaves = LeafHeap(context.eviction)
        self._node_ids = itertools.count()
        self._evictable_pages = 0
        self._locked_pages = 0
        self._eviction_age_s: float | None = None
        self._version = 0

    # -- Looking up and adding ------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix; see `PrefixCache.match`.

        Raises:
            InvariantError: `resume` is void, or the key is malformed.
        """
        start = self._start(resume, key.namespace)
        path = self._path(start, self._whole_pages(key), key.priority)
        for node in path:
            node.stats.hits += 1
            self._strategy.on_hit(node.stats)
        return PrefixMatch(path[-1] if path else start, _join([node.pages for node in path]))

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages a match would find, changing nothing."""
        root = self._roots.get(key.namespace)
        if root is None:
            return 0
        return sum(num_shared for _, num_shared in self._follow(root, self._whole_pages(key)))

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Take the pages the tree does not hold yet; see `PrefixCache.insert`.

        Raises:
            InvariantError: `handle` is void, or the number of pages does not fit the key.
        """
        tokens = self._whole_pages(key)
        self._check_offer(tokens, pages, handle)
        start = self._start(handle, key.namespace)
        path = self._path(start, tokens, key.priority)
        end = path[-1] if path else start
        existing_pages = end.num_pages
        if existing_pages * self._page_size < len(tokens):
            end = self._grow(end, tokens, pages[existing_pages - handle.num_pages :], key.priority)
            path.append(end)
        self._leaves.settle_many()
        return InsertResult(existing_pages, end.num_pages, end, _join([node.pages for node in path]))

    def _path(self, node: RadixNode, tokens: TokenIds, priority: int) -> list[RadixNode]:
        """Return the nodes below `node` on the key's longest cached prefix, touched; the last one is split to fit."""
        now = self._clock()
        path = []
        for child, num_shared in self._follow(node, tokens):
            step = child if num_shared == len(child.pages) else self._split(child, num_shared)
            step.stats.last_access = now
            step.stats.priority = max(step.stats.priority, priority)
            if step.is_evictable_leaf:
                self._leaves.touch(step)
            path.append(step)
        return path

    def _follow(self, node: RadixNode, tokens: TokenIds) -> Iterator[tuple[RadixNode, int]]:
        """Yield the nodes below `node` that continue the key, each with how many of its pages do.

        All but the last do in full; the caller may split the last.
        """
        page_size = self._page_size
        offset = node.num_pages * page_size
        while offset < len(tokens):
            child = node.children.get(self._edge_key(tokens, offset, page_size))
            if child is None:
                return
            num_shared = common_len(child.token_ids, tokens, offset) // page_size
            is_whole = num_shared == len(child.pages)
            yield child, num_shared
            if not is_whole:
                return
            node = child
            offset += num_shared * page_size

    def _grow(self, parent: RadixNode, tokens: TokenIds, pages: PageIds, priority: int) -> RadixNode:
        """Hang the key's remaining pages below a node."""
        now = self._clock()
        depth = parent.num_pages * self._page_size
        stats = NodeStats(now, now, tokens=len(tokens) - depth, depth=depth, priority=priority)
        leaf = RadixNode(
            next(self._node_ids),
            parent.namespace,
            parent,
            np.array(tokens[depth:], dtype=np.int32),
            np.array(pages, dtype=np.int32),
            stats,
        )
        if parent.parent is None:
            self._roots[parent.namespace] = parent
        parent.children[self._edge_key(leaf.token_ids, 0, self._page_size)] = leaf
        self._leaves.discard(parent)
        self._leaves.touch(leaf)
        self._evictable_pages += len(leaf.pages)
        self._version += 1
        self._strategy.on_insert(stats)
        self._notify("stored", stats.tokens)
        return leaf

    def _split(self, lower: RadixNode, num_upper_pages: int) -> RadixNode:
        """Move the upper part of a node's run into a new node above it; the old object stays the lower part."""
        cut = num_upper_pages * self._page_size
        token_ids, pages, parent = lower.token_ids, lower.pages, lower.parent
        # Each half gets a copy: a view would keep the whole run in memory after the other half is evicted.
        upper = RadixNode(
            next(self._node_ids),
            lower.namespace,
            parent,
            token_ids[:cut].copy(),
            pages[:num_upper_pages].copy(),
            replace(lower.stats, tokens=cut),
        )
        upper.num_locks = lower.num_locks
        assert parent is not None, "a root holds no run to split"
        parent.children[self._edge_key(token_ids, 0, self._page_size)] = upper
        upper.children[self._edge_key(token_ids, cut, self._page_size)] = lower
        lower.parent = upper
        lower.set_run(token_ids[cut:].copy(), pages[num_upper_pages:].copy())
        lower.stats.tokens -= cut
        lower.stats.depth += cut
        if lower.is_evictable_leaf:
            self._leaves.touch(lower)
        self._strategy.on_insert(upper.stats)
        return upper

    # -- Locks ----------------------------------------------------------------------------------------------------

    def lock(self, handle: PrefixHandle) -> None:
        """Keep the path to a handle from eviction until `unlock`.

        Raises:
            InvariantError: the handle is void.
        """
        node = self._own(handle)
        node.num_holds += 1
        for step in _upwards(node):
            if step.num_locks == 0:
                self._evictable_pages -= len(step.pages)
                self._locked_pages += len(step.pages)
                self._leaves.discard(step)
            step.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the handle is void, or not locked.
        """
        node = self._own(handle)
        if node.num_holds == 0:
            raise InvariantError(
                f"radix cache: unlock of a handle at page {node.num_pages} that nobody holds. "
                "Unlock a handle as often as it was locked."
            )
        node.num_holds -= 1
        for step in _upwards(node):
            step.num_locks -= 1
            if step.num_locks == 0:
                self._evictable_pages += len(step.pages)
                self._locked_pages -= len(step.pages)
                if step.is_evictable_leaf:
                    self._leaves.touch(step)
        self._leaves.settle_many()

    # -- Giving up pages ------------------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> PageIds:
        """Give up whole leaves, lowest priority first, until they are `num_pages` pages or none is left.

        Returns: int32, the page ids given up.
        """
        given_up: list[PageIds] = []
        num_given_up = 0
        while num_given_up < num_pages and (leaf := self._leaves.pop()) is not None:
            self._cut_off(leaf)
            given_up.append(leaf.pages)
            num_given_up += len(leaf.pages)
            last_used_s = leaf.stats.last_access
        if given_up:
            self._eviction_age_s = self._clock() - last_used_s
        return self._give_up(given_up, "removed")

    def reset(self) -> PageIds:
        """Forget everything that is not locked.

        Returns: int32, the page ids given up.
        """
        doomed = [node for node in self._nodes() if node.num_locks == 0]
        for node in reversed(doomed):  # children before parents
            self._leaves.discard(node)
            self._cut_off(node)
        return self._give_up([node.pages for node in doomed], "cleared")

    def _cut_off(self, leaf: RadixNode) -> None:
        """Take an unlocked leaf out of the tree; its parent may become an evictable leaf."""
        parent = leaf.parent
        assert parent is not None, "a root is never evicted"
        del parent.children[self._edge_key(leaf.token_ids, 0, self._page_size)]
        leaf.parent = None
        self._evictable_pages -= len(leaf.pages)
        self._strategy.on_evict(leaf.stats)
        if parent.is_evictable_leaf:
            self._leaves.touch(parent)
        elif parent.parent is None and not parent.children:
            del self._roots[parent.namespace]

    def _give_up(self, runs: list[PageIds], event: str) -> PageIds:
        if not runs:
            return NO_PAGES
        pages = _join(runs)
        self._version += 1
        self._notify(event, len(pages) * self._page_size)
        return pages

    # -- Reading --------------------------------------------------------------------------------------------------

    @property
    def evictable_pages(self) -> int:
        """Pages `evict` could give up now."""
        return self._evictable_pages

    @property
    def locked_pages(self) -> int:
        """Pages on locked paths."""
        return self._locked_pages

    @property
    def eviction_age_s(self) -> float | None:
        """How long what was evicted last had not been used, in seconds."""
        return self._eviction_age_s

    @property
    def version(self) -> int:
        """A number that grows whenever pages come or go."""
        return self._version

    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children. The cache must not change meanwhile; the arrays are read-only."""
        for node in self._nodes():
            assert node.parent is not None, "a node in the tree has a parent"
            yield NodeView(
                node_id=node.node_id,
                parent_id=node.parent.node_id if node.parent.num_pages else None,
                namespace=node.namespace,
                token_ids=node.token_ids,
                pages=node.pages,
                num_locks=node.num_locks,
                stats=node.stats,
            )

    def _nodes(self) -> Iterator[RadixNode]:
        """Yield every node but the roots, parents before children."""
        waiting = [child for root in self._roots.values() for child in root.children.values()]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    # -- Checking what came in ------------------------------------------------------------------------------------

    def _start(self, handle: PrefixHandle | None, namespace: str) -> RadixNode:
        """Return the node to go on from: the handle's, or the namespace's root.

        A root leaves with its last child, so a handle without pages is taken for the root of the day. A new root joins
        the tree with its first child.
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
            raise InvariantError(f"radix cache: got a handle of type {type(handle).__name__}, which it never gave out.")
        if handle.has_left:
            raise InvariantError(
                f"radix cache: the handle at page {handle.num_pages} was evicted. Lock a handle to keep it."
            )
        return handle

    def _whole_pages(self, key: PrefixKey) -> TokenIds:
        tokens = key.token_ids
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise InvariantError(f"radix cache: expected int32 token ids [n], got {tokens.dtype} {list(tokens.shape)}.")
        return tokens[: len(tokens) - len(tokens) % self._page_size]

    def _check_offer(self, tokens: TokenIds, pages: PageIds, handle: PrefixHandle) -> None:
        expected = len(tokens) // self._page_size - handle.num_pages
        if len(pages) != expected:
            raise InvariantError(
                f"radix cache: got {len(pages)} pages for a key of {len(tokens)} whole-page tokens from page "
                f"{handle.num_pages} on, expected {expected} pages of {self._page_size} tokens."
            )

    def _notify(self, event: str, num_tokens: int) -> None:
        if self._on_event is not None:
            self._on_event(event, num_tokens)


def _upwards(node: RadixNode) -> Iterator[RadixNode]:
    """Yield the node and its ancestors, the root included."""
    step: RadixNode | None = node
    while step is not None:
        yield step
        step = step.parent


def _join(runs: list[PageIds]) -> PageIds:
    return np.concatenate(runs) if runs else NO_PAGES
