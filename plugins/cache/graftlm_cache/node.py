"""A node of the radix tree: a run of tokens, and the pages of their keys and values."""

from __future__ import annotations

import numpy as np

from graftlm.contracts import NO_PAGES, NodeStats
from graftlm.types import PageIds, TokenIds

__all__ = ["ITEM_BYTES", "RadixNode", "common_pages", "join_pages"]

#: Number of bytes of a token id, and of a page id.
ITEM_BYTES = 4


#: Shared by all nodes that never had a child. This saves memory, because most nodes are leaves, and a dictionary of its
#: own would be a fifth of a node's size.
_NO_CHILDREN: dict[bytes, RadixNode] = {}


class RadixNode:
    """A run of whole pages below a parent; a namespace's root has no pages. A node is also the handle of its end.

        tokens    0 ................. stats.depth ............ stats.depth + stats.tokens
        pages     |  the ancestors'  |  this node's `pages`   |
                  |<-               num_pages               ->|

    Tokens and pages are stored as bytes of int32. So a run is compared in place by `bytes.startswith(run, offset)`,
    which is one memcmp, and the runs of a path are joined with one copy.

    Attributes:
        node_id: unique in the cache.
        namespace: the namespace of its prompts.
        parent: None for a root, and for a node that was removed from the tree.
        run: the tokens of the node's own pages.
        pages: the ids of the node's own pages.
        num_own_pages: number of the node's own pages.
        num_pages: number of pages from the start of the prompt to this node's end. It never changes: a split moves the
            upper part of the run to a new node.
        children: bytes of a child's first page of tokens -> child. Only `adopt` and `disown` change it.
        num_holds: number of locks of this node's own handle.
        num_locks: number of locks of handles on or below this node.
        num_pins: number of pinned prefixes that end at this node; pinned leaves are evicted after all other leaves.
        stats: the node's statistics, which the eviction strategy reads.
        heap_stamp: stamp of the node's valid heap entry, or None. Only `LeafHeap` writes it.
        awaits_entry: whether `LeafHeap` will compute its priority before the next pop. Only `LeafHeap` writes it.
    """

    __slots__ = (
        "awaits_entry",
        "children",
        "heap_stamp",
        "namespace",
        "node_id",
        "num_holds",
        "num_locks",
        "num_own_pages",
        "num_pages",
        "num_pins",
        "pages",
        "parent",
        "run",
        "stats",
    )

    def __init__(
        self, node_id: int, namespace: str, parent: RadixNode | None, run: bytes, pages: bytes, stats: NodeStats
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.parent = parent
        self.run = run
        self.pages = pages
        self.num_own_pages = num_own_pages = len(pages) // ITEM_BYTES
        self.num_pages: int = num_own_pages if parent is None else num_own_pages + parent.num_pages
        self.children = _NO_CHILDREN
        self.num_holds = 0
        self.num_locks = 0
        self.num_pins = 0
        self.stats = stats
        self.heap_stamp: int | None = None
        self.awaits_entry = False

    @classmethod
    def root(cls, node_id: int, namespace: str) -> RadixNode:
        """Return the root of a namespace: the start of its prompts."""
        return cls(node_id, namespace, None, b"", b"", NodeStats(created=0.0, last_access=0.0))

    def adopt(self, edge: bytes, child: RadixNode) -> None:
        """Add a child, or replace the child with the same edge."""
        if self.children is _NO_CHILDREN:
            self.children = {}
        self.children[edge] = child

    def disown(self, edge: bytes) -> None:
        """Remove a child."""
        del self.children[edge]

    @property
    def token_ids(self) -> TokenIds:
        """The node's own tokens: int32 [num_own_pages * page_size], read-only."""
        return np.frombuffer(self.run, np.int32)

    @property
    def page_ids(self) -> PageIds:
        """The ids of the node's own pages: int32 [num_own_pages], read-only."""
        return np.frombuffer(self.pages, np.int32)

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether the node may be evicted now; always false for a root."""
        return not (self.children or self.num_locks or self.parent is None)

    @property
    def has_left(self) -> bool:
        """Whether the node was removed from the tree by `evict` or `reset`, so that handles on it are invalid."""
        return self.parent is None and self.num_pages > 0


def common_pages(run: bytes, tokens: bytes, offset: int, page_bytes: int) -> int:
    """Return the number of equal whole pages at the start of `run` and of `tokens` from byte `offset` on."""
    num_compared = min(len(run), len(tokens) - offset) // ITEM_BYTES
    left = np.frombuffer(run, np.int32, num_compared)
    differs = left != np.frombuffer(tokens, np.int32, num_compared, offset)
    first = int(differs.argmax())
    return (first if differs[first] else num_compared) * ITEM_BYTES // page_bytes


def join_pages(runs: list[bytes]) -> PageIds:
    """Concatenate the page ids of nodes: int32, read-only.

    Args:
        runs: `RadixNode.pages` of each node.
    """
    if not runs:
        return NO_PAGES
    return np.frombuffer(runs[0] if len(runs) == 1 else b"".join(runs), np.int32)
