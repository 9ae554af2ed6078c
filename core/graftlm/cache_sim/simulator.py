"""Replays a trace through a prefix cache: what it finds, what it gives up, and how long it takes for that."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from graftlm.cache_sim.traces import TraceRequest
from graftlm.contracts import NodeStats, PrefixCache, PrefixHandle, PrefixKey
from graftlm.errors import PluginError
from graftlm.memory import PagePool
from graftlm.types import PageIds

__all__ = ["Replay", "Simulator", "TraceClock"]


class TraceClock:
    """The time of the trace, in seconds: the only time that the cache under test knows."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the arrival of the request that is being replayed."""
        return self.now_s


@dataclass(slots=True)
class Replay:
    """What came of a replay.

    Attributes:
        num_requests: of the trace.
        bypassed_requests: that need more than the whole capacity; they are computed without the cache.
        prompt_tokens: of all requests.
        hit_tokens: of them, found in the cache.
        prompt_cost, hit_cost: the prefill cost of both, as in `NodeStats.prefill_cost`: late tokens cost more.
        evicted_tokens: given up.
        match_ns, lock_ns, insert_ns, evict_ns: inside the cache, locking and unlocking together.
    """

    num_requests: int = 0
    bypassed_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_cost: float = 0.0
    hit_cost: float = 0.0
    evicted_tokens: int = 0
    match_ns: int = 0
    lock_ns: int = 0
    insert_ns: int = 0
    evict_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Running:
    """A request that still holds its prefix, and pages the cache did not take."""

    handle: PrefixHandle
    own_pages: PageIds


@dataclass(slots=True)
class Simulator:
    """Does for each request what an engine does: match, lock, make room, insert, and unlock later.

    A request takes the whole pages of its known tokens, all at once. What a partial page and an unrecorded output take
    is left out, in the offline optimum too.

    Attributes:
        cache: under test, empty.
        pool: all the pages there are.
        clock: the cache's; set to each request's arrival.
        block_tokens, page_size: of the trace and of the cache.
        in_flight: how many requests stay locked after they came. The oldest go early when their pages are needed.
    """

    cache: PrefixCache
    pool: PagePool
    clock: TraceClock
    block_tokens: int
    page_size: int
    in_flight: int = 0
    timer: Callable[[], int] = time.perf_counter_ns
    _running: deque[_Running] = field(default_factory=deque)
    _replay: Replay = field(default_factory=Replay)

    def run(self, requests: Iterable[TraceRequest], on_request: Callable[[], None] = lambda: None) -> Replay:
        """Replay requests in order.

        Args:
            requests: with times that do not fall.
            on_request: called after each.

        Raises:
            PluginError: the cache gives up fewer pages than it says it could.
        """
        for request in requests:
            self._serve(request)
            on_request()
        return self._replay

    def _serve(self, request: TraceRequest) -> None:
        replay = self._replay
        replay.num_requests += 1
        replay.prompt_tokens += request.prompt_tokens
        replay.prompt_cost += _prefill_cost(request.prompt_tokens)
        num_pages = request.num_tokens // self.page_size
        if num_pages > self.pool.num_pages:
            replay.bypassed_requests += 1
            return
        self.clock.now_s = request.time_s
        token_ids = request.token_ids(self.block_tokens)
        key = PrefixKey(token_ids, request.namespace, request.priority)
        # An engine computes at least one token of a prompt, to have something to sample from.
        prompt = PrefixKey(token_ids[: request.prompt_tokens - 1], request.namespace, request.priority)
        handle = self._find(prompt)
        self._keep(key, handle, self._take_pages(num_pages - handle.num_pages))
        while len(self._running) > self.in_flight:
            self._retire()

    def _find(self, prompt: PrefixKey) -> PrefixHandle:
        """Match a prompt and lock what is found."""
        replay, timer = self._replay, self.timer
        started = timer()
        match = self.cache.match(prompt)
        matched = timer()
        self.cache.lock(match.handle)
        replay.lock_ns += timer() - matched
        replay.match_ns += matched - started
        num_tokens = len(match.pages) * self.page_size
        replay.hit_tokens += num_tokens
        replay.hit_cost += _prefill_cost(num_tokens)
        return match.handle

    def _keep(self, key: PrefixKey, handle: PrefixHandle, pages: PageIds) -> None:
        """Insert what was computed past a handle, and move the lock there."""
        replay, timer = self._replay, self.timer
        start = handle.num_pages
        started = timer()
        result = self.cache.insert(key, pages, handle)
        inserted = timer()
        self.cache.lock(result.handle)
        self.cache.unlock(handle)
        replay.lock_ns += timer() - inserted
        replay.insert_ns += inserted - started
        self.pool.free(pages[: result.existing_pages - start])
        self._running.append(_Running(result.handle, pages[result.cached_pages - start :]))

    def _take_pages(self, num_pages: int) -> PageIds:
        while self._running and self.pool.num_free + self.cache.evictable_pages < num_pages:
            self._retire()
        if num_pages > self.pool.num_free:
            self._evict(num_pages - self.pool.num_free)
        return self.pool.alloc(num_pages)

    def _evict(self, num_pages: int) -> None:
        replay, timer = self._replay, self.timer
        started = timer()
        pages = self.cache.evict(num_pages)
        replay.evict_ns += timer() - started
        replay.evicted_tokens += len(pages) * self.page_size
        if len(pages) < num_pages:
            raise PluginError(
                f"the prefix cache gave up {len(pages)} pages when asked for {num_pages}, though no request holds any; "
                f"it has {self.cache.evictable_pages} evictable and {self.cache.locked_pages} locked pages left"
            )
        self.pool.free(pages)

    def _retire(self) -> None:
        """End the request that has been running the longest."""
        running, timer = self._running.popleft(), self.timer
        started = timer()
        self.cache.unlock(running.handle)
        self._replay.lock_ns += timer() - started
        self.pool.free(running.own_pages)


def _prefill_cost(num_tokens: int) -> float:
    """Return what computing the first tokens of a prompt costs."""
    return NodeStats(created=0.0, last_access=0.0, tokens=num_tokens).prefill_cost
