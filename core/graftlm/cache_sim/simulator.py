"""Replays a trace through a prefix cache, and measures its hits, its evictions and its time."""

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
    """The clock of the cache under test, which returns the time in the trace.

    Attributes:
        now_s: arrival time of the current request, in seconds.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the arrival time of the current request, in seconds."""
        return self.now_s


@dataclass(slots=True)
class Replay:
    """The figures of a replay.

    Attributes:
        num_requests: number of requests in the trace.
        bypassed_requests: number of requests that do not use the cache, because they need more pages than it has.
        prompt_tokens: number of prompt tokens of all requests.
        hit_tokens: number of prompt tokens found in the cache.
        prompt_cost, hit_cost: prefill cost of the prompt tokens and of the hit tokens, as in `NodeStats.prefill_cost`.
            The cost of a token grows with the number of tokens before it.
        evicted_tokens: number of evicted tokens.
        match_ns, lock_ns, insert_ns, evict_ns: time in the cache's methods, in nanoseconds. `lock_ns` includes
            `unlock`.
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
    """A request in flight.

    Attributes:
        handle: the locked prefix.
        own_pages: the request's pages that the cache did not accept.
    """

    handle: PrefixHandle
    own_pages: PageIds


@dataclass(slots=True)
class Simulator:
    """A simulator that calls the cache for each request like an engine: match, lock, evict, insert, and later unlock.

    A request allocates pages for its prompt and its recorded output in one call. Partial pages and unrecorded outputs
    need no room. The offline optimum makes the same assumptions.

    Attributes:
        cache: the cache under test, initially empty.
        pool: the pages of the cache; their number is the capacity.
        clock: clock of the cache, which is set to the arrival time of each request.
        block_tokens: number of tokens in a block of the trace.
        page_size: number of tokens in a page.
        in_flight: number of most recent requests whose pages stay locked. If a request needs more pages than are
            evictable, the oldest requests are unlocked earlier.
        timer: returns the time in nanoseconds.
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
            requests: the requests, in ascending order of time.
            on_request: called after each request.

        Raises:
            PluginError: the cache evicts fewer pages than it reports as evictable.
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
        # An engine computes at least the last token of a prompt, because it needs the logits for sampling.
        prompt = PrefixKey(token_ids[: request.prompt_tokens - 1], request.namespace, request.priority)
        handle = self._match(prompt)
        self._insert(key, handle, self._alloc_pages(num_pages - handle.num_pages))
        while len(self._running) > self.in_flight:
            self._retire()

    def _match(self, prompt: PrefixKey) -> PrefixHandle:
        """Match a prompt; lock the found prefix and return its handle."""
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

    def _insert(self, key: PrefixKey, handle: PrefixHandle, pages: PageIds) -> None:
        """Insert the pages after a locked prefix, and move the lock to the inserted prefix."""
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

    def _alloc_pages(self, num_pages: int) -> PageIds:
        """Allocate pages. If too few pages are free, unlock old requests and evict pages."""
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
                f"the prefix cache should have evicted {num_pages} pages, but evicted {len(pages)}; now "
                f"{self.cache.evictable_pages} of its pages are evictable and {self.cache.locked_pages} are locked"
            )
        self.pool.free(pages)

    def _retire(self) -> None:
        """Unlock the oldest request in flight, and free its own pages."""
        running, timer = self._running.popleft(), self.timer
        started = timer()
        self.cache.unlock(running.handle)
        self._replay.lock_ns += timer() - started
        self.pool.free(running.own_pages)


def _prefill_cost(num_tokens: int) -> float:
    """Return the cost of computing the first `num_tokens` tokens of a prompt."""
    return NodeStats(created=0.0, last_access=0.0, tokens=num_tokens).prefill_cost
