"""The offline optimum: a bound on the tokens any prefix cache of a capacity can find on a trace.

Belady's rule (1966) gives up the page whose next use is furthest, here its next use as a hit: pages that a request
writes again, the last of its prompt or its output, are lost on nobody. The rule is optimal for pages of one size, also
though each request needs all of its pages at once, since the pages in use are the same whatever was kept.

A prefix cache may only give up leaves, and hardly loses by that: whoever finds a page finds all before it, so the next
hit of a page is never later than that of the pages behind it, and among the furthest there is a leaf. The exception is
a page that is written again before it is found: a prefix cache needs it meanwhile for what stands behind it, and the
bound does not. Without recorded outputs that is one page in a trace now and then, and else the bound is reached.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from graftlm.cache_sim.page_tree import PageTree, RequestPath

__all__ = ["Optimum", "offline_optimum"]


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the best possible cache does.

    Attributes:
        hit_pages: of all prompts.
        evicted_pages: that it gives up for want of room.
    """

    hit_pages: int
    evicted_pages: int


def offline_optimum(tree: PageTree, capacity_pages: int, in_flight: int = 0) -> Optimum:
    """Replay a trace under Belady's rule.

    Args:
        tree: of the trace.
        capacity_pages: pages there are.
        in_flight: so many requests keep their pages after they came; as in `Simulator`.

    O(n log n) for n blocks in all requests.
    """
    paths = [path for path in tree.paths if path.num_pages <= capacity_pages]
    return _Belady(tree, capacity_pages, in_flight, never=len(paths)).run(paths)


@dataclass(frozen=True, slots=True)
class _NextHit:
    """When a block is found next.

    Attributes:
        request: the index of the request.
        num_pages: of the block, from its start; the others are written again before they are found.
    """

    request: int
    num_pages: int


class _Belady:
    """Blocks are given up from their end on, those with the furthest next hit first, deeper ones first among equals.

    The heap holds what became free to go, with the block's use count at that time: an entry counts when the block has
    not been used since. `keep` is how many pages of the block the entry does not speak for.
    """

    def __init__(self, tree: PageTree, capacity_pages: int, in_flight: int, never: int) -> None:
        self._sizes = tree.node_pages
        self._depths = tree.node_depths
        self._capacity = capacity_pages
        self._in_flight = in_flight
        num_nodes = len(self._sizes)
        self._held = [0] * num_nodes
        self._num_locks = [0] * num_nodes
        self._num_uses = [0] * num_nodes
        self._next_hits = [_NextHit(never, 0)] * num_nodes
        self._never = never
        self._heap: list[tuple[int, int, int, int, int]] = []  # (-next hit, -depth, node, uses, keep)
        self._running: deque[RequestPath] = deque()
        self._locked_pages = 0
        self._free = capacity_pages
        self._hit_pages = 0
        self._evicted_pages = 0

    def run(self, paths: list[RequestPath]) -> Optimum:
        for path, next_hits in zip(paths, self._all_next_hits(paths), strict=True):
            self._serve(path, next_hits)
        return Optimum(self._hit_pages, self._evicted_pages)

    def _all_next_hits(self, paths: list[RequestPath]) -> list[list[_NextHit]]:
        """Return, for each request and each of its blocks, when the block is found after that request."""
        following = [_NextHit(self._never, 0)] * len(self._sizes)
        found: list[list[_NextHit]] = []
        for index in range(len(paths) - 1, -1, -1):
            path = paths[index]
            found.append([following[node] for node in path.nodes])
            for node, num_pages in zip(path.nodes, self._prompt_parts(path), strict=True):
                following[node] = _NextHit(index if num_pages else self._never, num_pages)
        found.reverse()
        return found

    def _prompt_parts(self, path: RequestPath) -> Iterator[int]:
        """Yield how many pages of each block can be a hit."""
        left = path.prompt_pages
        for node in path.nodes:
            num_pages = min(left, self._sizes[node])
            left -= num_pages
            yield num_pages

    def _serve(self, path: RequestPath, next_hits: list[_NextHit]) -> None:
        held, sizes, nodes = self._held, self._sizes, path.nodes
        self._hit_pages += sum(map(min, self._prompt_parts(path), [held[node] for node in nodes]))
        num_new = path.num_pages - sum([held[node] for node in nodes])
        while self._running and self._locked_pages + self._unlocked_pages(path) > self._capacity:
            self._retire()
        self._lock(path)
        self._make_room(num_new)
        self._free -= num_new
        for node, next_hit in zip(nodes, next_hits, strict=True):
            held[node] = sizes[node]
            self._next_hits[node] = next_hit
        while len(self._running) > self._in_flight:
            self._retire()

    def _unlocked_pages(self, path: RequestPath) -> int:
        return sum([self._sizes[node] for node in path.nodes if not self._num_locks[node]])

    def _lock(self, path: RequestPath) -> None:
        self._locked_pages += self._unlocked_pages(path)
        self._running.append(path)
        for node in path.nodes:
            self._num_locks[node] += 1
            self._num_uses[node] += 1

    def _retire(self) -> None:
        """Unlock the request that has been locked the longest."""
        for node in self._running.popleft().nodes:
            self._num_locks[node] -= 1
            if not self._num_locks[node]:
                self._locked_pages -= self._sizes[node]
                self._offer(node)

    def _offer(self, node: int) -> None:
        """Let a block go: first the pages that are not found again, then the others."""
        next_hit, depth, uses = self._next_hits[node], self._depths[node], self._num_uses[node]
        if next_hit.num_pages < self._sizes[node]:
            heapq.heappush(self._heap, (-self._never, -depth, node, uses, next_hit.num_pages))
        if next_hit.num_pages:
            heapq.heappush(self._heap, (-next_hit.request, -depth, node, uses, 0))

    def _make_room(self, num_pages: int) -> None:
        held, heap = self._held, self._heap
        while self._free < num_pages:
            _, _, node, uses, keep = entry = heapq.heappop(heap)
            if uses != self._num_uses[node] or held[node] <= keep:
                continue
            given_up = min(held[node] - keep, num_pages - self._free)
            held[node] -= given_up
            self._free += given_up
            self._evicted_pages += given_up
            if held[node] > keep:
                heapq.heappush(heap, entry)
