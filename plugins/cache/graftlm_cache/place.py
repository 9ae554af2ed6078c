"""Where a probe of the radix tree ended, so that the next one can go on from there."""

from graftlm_cache.node import RadixNode, common_pages

__all__ = ["Place", "find_place"]


class Place:
    """Where a probe ended: below `node`, after some pages of the child that stood there with this run, if any did."""

    __slots__ = ("child", "edge", "node", "num_pages", "run")

    def __init__(self, node: RadixNode, edge: bytes, child: RadixNode | None, num_pages: int) -> None:
        self.node = node
        self.edge = edge
        self.child = child
        self.run = None if child is None else child.run
        self.num_pages = num_pages

    @property
    def still_holds(self) -> bool:
        """Whether a probe of the same key would end here again, if the node is still there: a split changes the run."""
        child = self.node.children.get(self.edge)
        return child is self.child and (child is None or child.run is self.run)


def find_place(node: RadixNode, tokens: bytes, page_bytes: int) -> Place:
    """Return where a match from `node` on would end, changing nothing.

    Args:
        tokens: whole pages, from the start of the prompt.
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
