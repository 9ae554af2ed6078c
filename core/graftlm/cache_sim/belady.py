"""The offline optimum: the most tokens any prefix cache of a capacity can serve from memory on a trace.

Belady's rule (1966) gives up what is used furthest in the future. A prefix cache may only give up leaves, and loses
nothing by that: whoever uses a block uses all before it, so the next use of a block is never later than that of the
blocks behind it, and among the furthest there is always a leaf. With pages of one size the rule is optimal, also when
each request needs all of its pages at once: the pages in use are the same under every rule.
"""

import heapq
from collections import deque
from dataclasses import dataclass

from graftlm.cache_sim.page_tree import PageTree, RequestPath

__all__ = ["Optimum", "offline_optimum"]


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the best possible cache does.

    Attributes:
        hit_pages: of all prompts.
        evicted_pages: that it gives up; of those never used again, as few as the capacity allows.
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
    return _Belady(tree, capacity_pages, in_flight).run()


class _Belady:
    """Blocks are given up page by page from their end, the furthest next use first, deeper ones first among equals.

    The heap holds blocks that were unlocked, some of them since used again, locked again or given up: an entry counts
    when the block is unlocked, holds pages, and still has the next use it was pushed with.
    """

    def __init__(self, tree: PageTree, capacity_pages: int, in_flight: int) -> None:
        self._tree = tree
        self._capacity = capacity_pages
        self._in_flight = in_flight
        num_nodes = len(tree.node_pages)
        self._held = [0] * num_nodes
        self._num_locks = [0] * num_nodes
        self._next_use = [0] * num_nodes
        self._heap: list[tuple[int, int, int]] = []  # (-next use, -depth, node)
        self._running: deque[RequestPath] = deque()
        self._locked_pages = 0
        self._free = capacity_pages
        self._hit_pages = 0
        self._evicted_pages = 0

    def run(self) -> Optimum:
        paths = [path for path in self._tree.paths if path.num_pages <= self._capacity]
        for path, next_uses in zip(paths, self._next_uses(paths), strict=True):
            self._serve(path, next_uses)
        return Optimum(self._hit_pages, self._evicted_pages)

    def _next_uses(self, paths: list[RequestPath]) -> list[list[int]]:
        """Return, for each request and each of its blocks, the index of the next request with that block."""
        never = len(paths)
        following = [never] * len(self._held)
        found: list[list[int]] = []
        for index in range(len(paths) - 1, -1, -1):
            nodes = paths[index].nodes
            found.append([following[node] for node in nodes])
            for node in nodes:
                following[node] = index
        found.reverse()
        return found

    def _serve(self, path: RequestPath, next_uses: list[int]) -> None:
        held = self._held
        cached = sum([held[node] for node in path.nodes])
        self._hit_pages += min(cached, path.prompt_pages)
        while self._running and self._locked_pages + self._unlocked_pages(path) > self._capacity:
            self._retire()
        self._lock(path)
        self._make_room(path.num_pages - cached)
        for node, next_use in zip(path.nodes, next_uses, strict=True):
            held[node] = self._tree.node_pages[node]
            self._next_use[node] = next_use
        self._free -= path.num_pages - cached
        self._running.append(path)
        while len(self._running) > self._in_flight:
            self._retire()

    def _unlocked_pages(self, path: RequestPath) -> int:
        return sum([self._tree.node_pages[node] for node in path.nodes if not self._num_locks[node]])

    def _lock(self, path: RequestPath) -> None:
        self._locked_pages += self._unlocked_pages(path)
        for node in path.nodes:
            self._num_locks[node] += 1

    def _retire(self) -> None:
        """Unlock the request that has been locked the longest."""
        tree = self._tree
        for node in self._running.popleft().nodes:
            self._num_locks[node] -= 1
            if not self._num_locks[node]:
                self._locked_pages -= tree.node_pages[node]
                heapq.heappush(self._heap, (-self._next_use[node], -tree.node_depths[node], node))

    def _make_room(self, num_pages: int) -> None:
        held, heap = self._held, self._heap
        while self._free < num_pages:
            minus_next_use, minus_depth, node = heapq.heappop(heap)
            if self._num_locks[node] or not held[node] or self._next_use[node] != -minus_next_use:
                continue
            given_up = min(held[node], num_pages - self._free)
            held[node] -= given_up
            self._free += given_up
            self._evicted_pages += given_up
            if held[node]:
                heapq.heappush(heap, (minus_next_use, minus_depth, node))
