"""The tree of all blocks in a trace: the final contents of a cache of unlimited size."""

from dataclasses import dataclass

from graftlm.cache_sim.traces import Trace

__all__ = ["PageTree", "RequestPath"]


@dataclass(frozen=True, slots=True)
class RequestPath:
    """The path of a request through the tree.

    `PageTree` creates one per request; the computation of the optimum reads them.

    Attributes:
        nodes: numbers of the request's blocks, starting at the root. Blocks shorter than a page are left out.
        num_pages: number of pages in these blocks.
        prompt_pages: maximum number of hit pages; at least one token of a prompt is always computed.
    """

    nodes: tuple[int, ...]
    num_pages: int
    prompt_pages: int


class PageTree:
    """The tree of blocks. The parent of a block is the block before it in a request.

    Blocks are numbered from 0. A parent has a smaller number than its children.

    Attributes:
        paths: the path of each request, in the order of the trace.
        node_pages: number of whole pages in each block.
        node_depths: number of blocks before each block.
        total_pages: number of pages in all blocks, which is the trace's footprint.
    """

    def __init__(self, trace: Trace, page_size: int) -> None:
        self.paths: list[RequestPath] = []
        self.node_pages: list[int] = []
        self.node_depths: list[int] = []
        self._numbers: dict[tuple[object, int], int] = {}  # (parent, or namespace of a first block; block id) -> number
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
        """Return the number of a block; a new block is added first."""
        number = self._numbers.setdefault((parent, block), len(self.node_pages))
        if number == len(self.node_pages):
            self.node_pages.append(num_pages)
            self.node_depths.append(depth)
        return number
