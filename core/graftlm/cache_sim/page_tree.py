"""The tree of all blocks a trace ever asks for: what a cache without bounds would hold in the end."""

from dataclasses import dataclass

from graftlm.cache_sim.traces import Trace

__all__ = ["PageTree", "RequestPath"]


@dataclass(frozen=True, slots=True)
class RequestPath:
    """One request's way through the tree.

    Attributes:
        nodes: numbers of its blocks, from the root on; blocks with less than a page are left out.
        num_pages: of all of them.
        prompt_pages: the most that can be a hit: at least one token of a prompt is always computed.
    """

    nodes: tuple[int, ...]
    num_pages: int
    prompt_pages: int


class PageTree:
    """Blocks by what stands before them, numbered, parents before children.

    Attributes:
        paths: one for each request, in order.
        node_pages: whole pages in each block.
        node_depths: blocks in front of each.
        total_pages: of all blocks: the trace's footprint.
    """

    def __init__(self, trace: Trace, page_size: int) -> None:
        self.paths: list[RequestPath] = []
        self.node_pages: list[int] = []
        self.node_depths: list[int] = []
        self._numbers: dict[tuple[object, int], int] = {}  # by parent (a namespace at the root) and block
        for request in trace.requests:
            nodes = []
            parent: object = request.namespace
            for depth, block in enumerate(request.block_ids.tolist()):
                num_tokens = min(trace.block_tokens, request.num_tokens - depth * trace.block_tokens)
                if num_tokens < page_size:
                    break
                parent = self._node(parent, block, num_tokens // page_size, depth)
                nodes.append(parent)
            prompt_pages = (request.prompt_tokens - 1) // page_size
            self.paths.append(RequestPath(tuple(nodes), request.num_tokens // page_size, prompt_pages))
        self.total_pages = sum(self.node_pages)

    def _node(self, parent: object, block: int, num_pages: int, depth: int) -> int:
        number = self._numbers.setdefault((parent, block), len(self.node_pages))
        if number == len(self.node_pages):
            self.node_pages.append(num_pages)
            self.node_depths.append(depth)
        return number
