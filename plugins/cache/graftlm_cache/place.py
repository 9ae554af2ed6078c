"""The end of a probe of the radix tree, from which the next probe of the same key starts."""

from graftlm_cache.node import RadixNode, common_pages

__all__ = ["Place", "find_place"]


class Place:
    """The end of a probe. The key matches all of `node`, and the start of `child` if there is a child at `edge`.

    `RadixCache` creates it, and passes it to the next probe of the same key.

    Attributes:
        node: the last node that matched in full.
        edge: bytes of the key's next page; empty if the key has no further page.
        child: the child at `edge`, or None.
        run: the run of `child` at the time of the probe, or None.
        num_pages: number of pages that match.
    """

    __slots__ = ("child", "edge", "node", "num_pages", "run")

    def __init__(self, node: RadixNode, edge: bytes, child: RadixNode | None, num_pages: int) -> None:
        self.node = node
        self.edge = edge
        self.child = child
        self.run = None if child is None else child.run
        self.num_pages = num_pages

    @property
    def is_current(self) -> bool:
        """Whether a probe of the same key would end here again, provided that `node` is still in the tree.

        A split of the child is noticed, because it changes the child's run.
        """
        child = self.node.children.get(self.edge)
        return child is self.child and (child is None or child.run is self.run)


def find_place(node: RadixNode, tokens: bytes, page_bytes: int) -> Place:
    """Return the place where a match that continues from `node` would end. The tree is not changed.

    Args:
        node: a node whose path is a prefix of `tokens`.
        tokens: bytes of int32 token ids; whole pages, from the start of the prompt.
        page_bytes: number of bytes of a page's token ids.
    """
    offset = node.num_pages * page_bytes
    while True:
        edge = tokens[offset : offset + page_bytes]
        child = node.children.get(edge) if edge else None
        if child is None:
            return Place(node, edge, None, node.num_pages)
        if not tokens.startswith(child.run, offset):
            return Place(node, edge, child, node.num_pages + common_pages(child.run, tokens, offset, page_bytes))
        offset += len(child.run)
        node = child
