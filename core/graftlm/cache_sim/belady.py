"""The offline optimum: an upper bound on the hits of any prefix cache of a given capacity on a given trace.

Belady's rule (1966) evicts the page whose next use is furthest in the future. Here only a hit counts as a use. A
request always writes the last page of its prompt and the pages of its output, whether they are cached or not. The rule
is optimal because all pages have the same size. A request needs all of its pages at the same time; the rule is still
optimal, because the pages in use do not depend on the eviction decisions.

A prefix cache may evict only leaves. This restriction costs almost nothing: a request that hits a page also hits all
pages before it. So the next hit of a page is never later than the next hits of the pages after it, and one of the pages
with the furthest next hit is a leaf. The only exception is a page that is written again before its next hit. A prefix
cache cannot evict this page before the pages after it, but Belady's rule can. In traces without recorded outputs such
pages are rare. Without such pages, a prefix cache can reach the bound.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from graftlm.cache_sim.page_tree import PageTree, RequestPath

__all__ = ["Optimum", "offline_optimum"]


@dataclass(frozen=True, slots=True)
class Optimum:
    """The figures of the best possible cache.

    No order of evictions has more hits. The tables compare each strategy with it.

    Attributes:
        hit_pages: number of pages found in the cache, over all prompts.
        evicted_pages: number of pages evicted to make room.
    """

    hit_pages: int
    evicted_pages: int


def offline_optimum(tree: PageTree, capacity_pages: int, in_flight: int = 0) -> Optimum:
    """Replay a trace with Belady's rule, in O(n log n) time for n blocks in all requests.

    Args:
        tree: the tree of the trace.
        capacity_pages: number of pages in the cache. Requests that need more pages are skipped.
        in_flight: number of most recent requests whose pages stay locked, as in `Simulator`.
    """
    paths = [path for path in tree.paths if path.num_pages <= capacity_pages]
    return _Belady(tree, capacity_pages, in_flight, never=len(paths)).run(paths)


@dataclass(frozen=True, slots=True)
class _NextHit:
    """The next hit of a block.

    Attributes:
        request: index of the request that hits the block.
        num_pages: number of hit pages, from the start of the block. The request writes the block's other pages again.
    """

    request: int
    num_pages: int


class _Belady:
    """A replay of requests with evictions by Belady's rule.

    The block with the furthest next hit is evicted first; of several such blocks, the deepest one. A block's last pages
    are evicted first.

    The heap contains the evictable blocks. An entry has the block's use count at the time when the block became
    evictable, and is valid as long as this count has not changed. `keep` is the number of pages at the start of the
    block that the entry must not evict.
    """

    def __init__(self, tree: PageTree, capacity_pages: int, in_flight: int, never: int) -> None:
        self._sizes = tree.node_pages
        self._depths = tree.node_depths
        self._capacity = capacity_pages
        self._in_flight = in_flight
        num_nodes = len(self._sizes)
        self._cached_pages = [0] * num_nodes  # block -> number of cached pages
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
        """Return, for each request and each of its blocks, the next hit of the block after this request."""
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
        """Yield, for each block, the number of its pages that can be hits."""
        remaining = path.prompt_pages
        for node in path.nodes:
            num_pages = min(remaining, self._sizes[node])
            remaining -= num_pages
            yield num_pages

    def _serve(self, path: RequestPath, next_hits: list[_NextHit]) -> None:
        cached, sizes, nodes = self._cached_pages, self._sizes, path.nodes
        self._hit_pages += sum(map(min, self._prompt_parts(path), [cached[node] for node in nodes]))
        num_new = path.num_pages - sum([cached[node] for node in nodes])
        while self._running and self._locked_pages + self._unlocked_pages(path) > self._capacity:
            self._retire()
        self._lock(path)
        self._make_room(num_new)
        self._free -= num_new
        for node, next_hit in zip(nodes, next_hits, strict=True):
            cached[node] = sizes[node]
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
        """Unlock the blocks of the oldest locked request."""
        for node in self._running.popleft().nodes:
            self._num_locks[node] -= 1
            if not self._num_locks[node]:
                self._locked_pages -= self._sizes[node]
                self._make_evictable(node)

    def _make_evictable(self, node: int) -> None:
        """Add a block to the heap; pages without a later hit get an entry that is evicted earlier."""
        next_hit, depth, uses = self._next_hits[node], self._depths[node], self._num_uses[node]
        if next_hit.num_pages < self._sizes[node]:
            heapq.heappush(self._heap, (-self._never, -depth, node, uses, next_hit.num_pages))
        if next_hit.num_pages:
            heapq.heappush(self._heap, (-next_hit.request, -depth, node, uses, 0))

    def _make_room(self, num_pages: int) -> None:
        """Evict pages until `num_pages` are free."""
        cached, heap = self._cached_pages, self._heap
        while self._free < num_pages:
            _, _, node, uses, keep = entry = heapq.heappop(heap)
            if uses != self._num_uses[node] or cached[node] <= keep:
                continue
            num_evicted = min(cached[node] - keep, num_pages - self._free)
            cached[node] -= num_evicted
            self._free += num_evicted
            self._evicted_pages += num_evicted
            if cached[node] > keep:
                heapq.heappush(heap, entry)
