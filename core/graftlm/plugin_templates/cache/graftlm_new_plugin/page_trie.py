"""The cache: a trie in which each node is one page of tokens.

start ── "You are" ── " a help" ── "ful bot"     one node for each page; a path from the start is a prefix
     └── "Once up" ── "on a ti"
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from graftlm.contracts import (
    NO_PAGES,
    CacheContext,
    InsertResult,
    NodeStats,
    NodeView,
    Options,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
)
from graftlm.errors import InvariantError
from graftlm.records import CacheEvent
from graftlm.types import PageIds, TokenIds
from pydantic import Field

__all__ = ["PageTrie", "PageTrieOptions"]


class PageTrieOptions(Options):
    """The entries of `cache.options` in a configuration."""

    max_prefix_pages: int | None = Field(
        default=None, ge=1, description="Maximum number of cached pages of a prompt. Null: all pages are cached."
    )


@dataclass(slots=True, eq=False)
class _Node:
    """One cached page, and the handle for the prefix that ends with this page. The root is a node without a page.

    Attributes:
        children: (namespace, bytes of the child's tokens) -> child.
        num_pages: number of pages from the start of the prompt to the end of this page.
        num_locks: number of locks of this node and of its descendants.
    """

    node_id: int
    parent: "_Node | None"
    place: tuple[str, bytes]
    token_ids: TokenIds
    page: int
    num_pages: int
    stats: NodeStats
    children: dict[tuple[str, bytes], "_Node"] = field(default_factory=dict)
    num_locks: int = 0

    def path(self) -> Iterator["_Node"]:
        """Yield this node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PageTrie(PrefixCache):
    """A prefix cache that is searched page by page. An eviction scans all nodes for leaves once, then uses a heap."""

    def __init__(self, options: PageTrieOptions, context: CacheContext) -> None:
        self._context = context
        self._max_pages = options.max_prefix_pages
        self._start = _Node(0, None, ("", b""), NO_PAGES, -1, 0, NodeStats(created=0.0, last_access=0.0))
        self._nodes: dict[int, _Node] = {}  # in order of creation, so parents come before children
        self._num_made = 0
        self._num_locked = 0
        self._version = 0

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix, and count a hit for each of its nodes."""
        start = self._own(resume or self._start)
        found = self._find(key, start)
        self._touch(found, key.priority)
        for node in found:
            node.stats.hits += 1
            self._context.eviction.on_hit(node.stats)
        return PrefixMatch(found[-1] if found else start, _pages(found))

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Add the pages that are not cached yet, up to the limit of `max_prefix_pages`."""
        start = self._own(handle)
        path = self._find(key, start)
        self._touch(path, key.priority)
        num_existing = start.num_pages + len(path)
        for offset in range(len(path), self._num_kept(start.num_pages + len(pages)) - start.num_pages):
            path.append(self._add(key, int(pages[offset]), path[-1] if path else start))
        last = path[-1] if path else start
        return InsertResult(num_existing, last.num_pages, last, _pages(path))

    def lock(self, handle: PrefixHandle) -> None:
        """Protect the path to a handle from eviction."""
        for node in self._own(handle).path():
            node.num_locks += 1
            self._num_locked += node.num_locks == 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: the handle is not locked.
        """
        for node in self._own(handle).path():
            if node.num_locks == 0:
                raise InvariantError(f"new-plugin: unlock of a handle at page {node.num_pages} that is not locked")
            node.num_locks -= 1
            self._num_locked -= node.num_locks == 0

    def evict(self, num_pages: int) -> PageIds:
        """Evict leaves in the strategy's order. A parent becomes a leaf when its last child is evicted."""
        leaves = [self._ranked(node) for node in self._nodes.values() if _is_evictable(node)]
        heapq.heapify(leaves)
        gone: list[_Node] = []
        while leaves and len(gone) < num_pages:
            *_, node = heapq.heappop(leaves)
            self._drop(node)
            gone.append(node)
            if node.parent is not None and node.parent is not self._start and _is_evictable(node.parent):
                heapq.heappush(leaves, self._ranked(node.parent))
        return _pages(gone)

    def reset(self) -> PageIds:
        """Evict everything that is not locked."""
        gone = [node for node in self._nodes.values() if node.num_locks == 0]
        for node in reversed(gone):  # children before parents
            self._drop(node)
        return _pages(gone)

    @property
    def evictable_pages(self) -> int:
        """Number of pages that no lock protects."""
        return len(self._nodes) - self._num_locked

    @property
    def locked_pages(self) -> int:
        """Number of pages that a lock protects."""
        return self._num_locked

    @property
    def version(self) -> int:
        """Version of the content, which grows with each page that is added or evicted."""
        return self._version

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find."""
        return len(self._find(key, self._start))

    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children."""
        for node in self._nodes.values():
            yield NodeView(
                node_id=node.node_id,
                parent_id=self._parent_id(node),
                namespace=node.place[0],
                token_ids=node.token_ids,
                pages=_pages([node]),
                num_locks=node.num_locks,
                stats=node.stats,
            )

    def _find(self, key: PrefixKey, start: _Node) -> list[_Node]:
        """Return the nodes of the key's pages after `start`, up to the first page that is not cached."""
        found: list[_Node] = []
        node = start
        for page_idx in range(start.num_pages, len(key.token_ids) // self._context.page_size):
            child = node.children.get((key.namespace, self._tokens(key, page_idx).tobytes()))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _tokens(self, key: PrefixKey, page_idx: int) -> TokenIds:
        page_size = self._context.page_size
        return key.token_ids[page_idx * page_size : (page_idx + 1) * page_size]

    def _num_kept(self, num_pages: int) -> int:
        return num_pages if self._max_pages is None else min(num_pages, self._max_pages)

    def _touch(self, nodes: list[_Node], priority: int) -> None:
        now = self._context.clock()
        for node in nodes:
            node.stats.last_access = now
            node.stats.priority = max(node.stats.priority, priority)

    def _add(self, key: PrefixKey, page: int, parent: _Node) -> _Node:
        token_ids = self._tokens(key, parent.num_pages).copy()
        now, page_size = self._context.clock(), self._context.page_size
        stats = NodeStats(now, now, tokens=page_size, depth=parent.num_pages * page_size, priority=key.priority)
        self._num_made += 1
        place = (key.namespace, token_ids.tobytes())
        node = _Node(self._num_made, parent, place, token_ids, page, parent.num_pages + 1, stats)
        parent.children[place] = self._nodes[node.node_id] = node
        self._context.eviction.on_insert(stats)
        self._report(CacheEvent("stored", page_size, node.node_id, self._parent_id(node), key.namespace, token_ids))
        return node

    def _drop(self, node: _Node) -> None:
        if node.parent is not None:
            del node.parent.children[node.place]
        del self._nodes[node.node_id]
        self._context.eviction.on_evict(node.stats)
        self._report(CacheEvent("removed", self._context.page_size, node.node_id, None, node.place[0]))

    def _report(self, event: CacheEvent) -> None:
        self._version += 1
        if self._context.on_event is not None:
            self._context.on_event(event)

    def _ranked(self, node: _Node) -> tuple[tuple[float, ...], int, _Node]:
        return self._context.eviction.priority(node.stats), node.node_id, node

    def _parent_id(self, node: _Node) -> int | None:
        return None if node.parent is None or node.parent is self._start else node.parent.node_id

    def _own(self, handle: PrefixHandle) -> _Node:
        if not isinstance(handle, _Node):
            raise InvariantError(
                f"new-plugin: got a handle of type {type(handle).__name__}, expected one that this cache returned"
            )
        return handle


def _is_evictable(node: _Node) -> bool:
    return not node.children and node.num_locks == 0


def _pages(nodes: list[_Node]) -> PageIds:
    return np.array([node.page for node in nodes], dtype=np.int32)
