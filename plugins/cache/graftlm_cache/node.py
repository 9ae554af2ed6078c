"""A node of the radix tree: one run of tokens, and the pages that hold their keys and values."""

from __future__ import annotations

from typing import TypeAlias

from graftlm.contracts import NO_PAGES, NodeStats
from graftlm.types import PageIds, TokenIds

__all__ = ["EdgeKey", "RadixNode", "common_len", "page_edge", "token_edge"]

#: What a child is found by: its first token, or the bytes of its first page.
EdgeKey: TypeAlias = int | bytes


class RadixNode:
    """A run of whole pages below a parent; a namespace's root holds none. It is also the handle of its own end.

        tokens    0 ................. stats.depth ............ stats.depth + len(token_ids)
        pages     |  the ancestors'  |  this node's `pages`   |
                  |<-               num_pages               ->|

    Attributes:
        parent: None for a root, and for a node that left the tree.
        token_ids: int32 [len(pages) * page_size], read-only.
        pages: int32, read-only.
        num_pages: pages from the start of the prompt to this node's end. Never changes: a split gives the upper part
            of the run to a new node.
        children: by first token or page.
        num_holds: locks of this node's own handle.
        num_locks: locks of handles on or below this node.
        stats: what the eviction strategy reads.
        heap_stamp: the valid heap entry's stamp, or None without one. Written by `LeafHeap` only.
        awaits_entry: whether `LeafHeap` will look at it before its next pop. Written by `LeafHeap` only.
    """

    __slots__ = (
        "awaits_entry",
        "children",
        "heap_stamp",
        "namespace",
        "node_id",
        "num_holds",
        "num_locks",
        "num_pages",
        "pages",
        "parent",
        "stats",
        "token_ids",
    )

    def __init__(
        self,
        node_id: int,
        namespace: str,
        parent: RadixNode | None,
        token_ids: TokenIds,
        pages: PageIds,
        stats: NodeStats,
    ) -> None:
        self.node_id = node_id
        self.namespace = namespace
        self.parent = parent
        self.num_pages: int = len(pages) + (0 if parent is None else parent.num_pages)
        self.children: dict[EdgeKey, RadixNode] = {}
        self.num_holds = 0
        self.num_locks = 0
        self.stats = stats
        self.heap_stamp: int | None = None
        self.awaits_entry = False
        self.set_run(token_ids, pages)

    @classmethod
    def root(cls, node_id: int, namespace: str) -> RadixNode:
        """Return the start of a namespace's prompts."""
        return cls(node_id, namespace, None, NO_PAGES, NO_PAGES, NodeStats(created=0.0, last_access=0.0))

    def set_run(self, token_ids: TokenIds, pages: PageIds) -> None:
        """Set the node's own run; the arrays become read-only, so that views of them may be given out."""
        token_ids.flags.writeable = False
        pages.flags.writeable = False
        self.token_ids = token_ids
        self.pages = pages

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether eviction may take the node now."""
        return not self.children and self.num_locks == 0 and self.parent is not None

    @property
    def has_left(self) -> bool:
        """Whether the node was evicted or reset away, so that a handle on it is void."""
        return self.parent is None and self.num_pages > 0


def common_len(run: TokenIds, tokens: TokenIds, offset: int) -> int:
    """Return how many tokens `run` and `tokens[offset:]` have in common at the front; neither is empty."""
    num_compared = min(len(run), len(tokens) - offset)
    differs = run[:num_compared] != tokens[offset : offset + num_compared]
    first = int(differs.argmax())
    return first if differs[first] else num_compared


def token_edge(tokens: TokenIds, offset: int, page_size: int) -> EdgeKey:
    """Return the edge key of the page at a token offset, for pages of one token."""
    return tokens.item(offset)


def page_edge(tokens: TokenIds, offset: int, page_size: int) -> EdgeKey:
    """Return the edge key of the page at a token offset."""
    return tokens[offset : offset + page_size].tobytes()
