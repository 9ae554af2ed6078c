"""A simulated replica: a queue, steps whose duration a cost model gives, and a real prefix cache."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from graftlm.cache_sim import TraceClock, TraceRequest
from graftlm.contracts import PrefixCache, PrefixHandle, PrefixKey
from graftlm.memory import PagePool
from graftlm.route_sim.costs import StepCosts
from graftlm.routing import Route
from graftlm.types import PageIds

__all__ = ["ReplicaLimits", "ReplicaTotals", "SimulatedReplica", "SimulatedRequest"]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request of the trace, on one replica.

    Attributes:
        recorded: the request in the trace.
        route: the request as the router sees it; its tokens include the recorded output.
        key: prefix key of all recorded tokens.
        num_outputs: number of generated tokens, at least 1.
        uncached: number of prompt tokens that remain to be computed.
        handle: the locked prefix; None while the request waits, or if it does not use the cache.
        own_pages: pages of the request that the cache does not own.
    """

    recorded: TraceRequest
    route: Route
    key: PrefixKey
    num_outputs: int
    uncached: int = 0
    handle: PrefixHandle | None = None
    own_pages: PageIds | None = None


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """The limits of a replica's steps.

    Attributes:
        max_running: maximum number of running requests.
        prefill_tokens: maximum number of prompt tokens in a step.
    """

    max_running: int = 64
    prefill_tokens: int = 2048


@dataclass(slots=True)
class ReplicaTotals:
    """The figures of a replica over a run.

    Attributes:
        num_requests: number of requests.
        hit_tokens: number of prompt tokens found in the cache.
        computed_tokens: number of prompt and output tokens that were computed.
        busy_s: sum of the durations of all steps, in seconds.
    """

    num_requests: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    busy_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """Runs requests in steps, with continuous batching and chunked prefill.

    A request is matched, and its pages are allocated and published, when it is admitted. Consecutive steps without
    prompt tokens are simulated together, up to the first end of a request.

    Attributes:
        cache: the prefix cache under test.
        pool: the pages of the cache.
        clock: the clock of the cache, in simulated time.
        page_size: number of tokens in a page.
        costs: the durations of steps.
        limits: the limits of steps.
        on_first_token: called with each request that has its first token.
        on_end: called with each request that has ended.
        totals: the figures so far.
    """

    cache: PrefixCache
    pool: PagePool
    clock: TraceClock
    page_size: int
    costs: StepCosts
    limits: ReplicaLimits
    on_first_token: Callable[[SimulatedRequest], None]
    on_end: Callable[[SimulatedRequest], None]
    totals: ReplicaTotals = field(default_factory=ReplicaTotals)
    _waiting: deque[SimulatedRequest] = field(default_factory=deque)
    _prefilling: deque[SimulatedRequest] = field(default_factory=deque)
    # Rows that generate: (number of the decode step that is their last, order, request).
    _decoding: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list)
    _num_decodes: int = 0  # decode steps so far
    _order: int = 0
    _started_s: float | None = None  # start of the current steps; None while idle
    _step_s: float = 0.0
    _num_steps: int = 0  # number of current steps, all of the same duration
    _chunk: int = 0  # prompt tokens of the current step

    def add(self, request: SimulatedRequest, now_s: float) -> float | None:
        """Queue a request. Return the new end of the current steps, None if it does not change.

        If the replica runs several steps without prompt tokens, only the current one is completed.
        """
        self.totals.num_requests += 1
        self._waiting.append(request)
        if self._started_s is None:
            return self._start(now_s)
        if self._num_steps > 1:
            done = int((now_s - self._started_s) / self._step_s) + 1
            if done < self._num_steps:
                self._num_steps = done
                return self._started_s + done * self._step_s
        return None

    def advance(self, now_s: float) -> float | None:
        """Complete the current steps at their end, and start the next ones. Return their end, None if idle."""
        self.clock.now_s = now_s
        totals, num_steps = self.totals, self._num_steps
        totals.busy_s += num_steps * self._step_s
        totals.computed_tokens += self._chunk + num_steps * len(self._decoding)
        self._num_decodes += num_steps
        while self._decoding and self._decoding[0][0] <= self._num_decodes:
            self._end(heapq.heappop(self._decoding)[2])
        self._complete_chunk()
        return self._start(now_s)

    def _complete_chunk(self) -> None:
        chunk = self._chunk
        while chunk:
            request = self._prefilling[0]
            taken = min(chunk, request.uncached)
            request.uncached -= taken
            chunk -= taken
            if request.uncached:
                return
            self._prefilling.popleft()
            self.on_first_token(request)
            if request.num_outputs == 1:
                self._end(request)
            else:
                self._order += 1
                last = self._num_decodes + request.num_outputs - 1
                heapq.heappush(self._decoding, (last, self._order, request))

    def _start(self, now_s: float) -> float | None:
        self.clock.now_s = now_s
        budget = self.limits.prefill_tokens
        chunk = min(budget, sum(request.uncached for request in self._prefilling))
        while self._waiting and chunk < budget and self._num_running < self.limits.max_running:
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            self._prefilling.append(request)
            chunk = min(budget, chunk + request.uncached)
        self._chunk = chunk
        if not chunk and not self._decoding:
            self._started_s = None
            return None
        self._num_steps = 1 if chunk else self._decoding[0][0] - self._num_decodes
        self._step_s = self.costs.seconds(chunk, len(self._decoding))
        self._started_s = now_s
        return now_s + self._num_steps * self._step_s

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def _admit(self, request: SimulatedRequest) -> bool:
        """Match a request and publish its prompt. Return False if it must wait for pages."""
        recorded, cache = request.recorded, self.cache
        num_pages = recorded.num_tokens // self.page_size
        if num_pages > self.pool.num_pages:
            request.uncached = recorded.prompt_tokens  # too long for the cache
            return True
        tokens = request.key.token_ids[: recorded.prompt_tokens]
        # An engine computes at least the last token of a prompt, because it needs the logits for sampling.
        handle = cache.match(PrefixKey(tokens[:-1], recorded.namespace, recorded.priority)).handle
        cache.lock(handle)
        missing = num_pages - handle.num_pages - self.pool.num_free
        if missing > cache.evictable_pages and self._num_running:
            cache.unlock(handle)
            return False
        if missing > 0:
            self.pool.free(cache.evict(missing))
        hit_tokens = handle.num_pages * self.page_size
        self.totals.hit_tokens += hit_tokens
        request.uncached = recorded.prompt_tokens - hit_tokens
        request.handle = handle
        prompt = PrefixKey(tokens, recorded.namespace, recorded.priority)
        self._publish(request, prompt, self.pool.alloc(num_pages - handle.num_pages))
        return True

    def _publish(self, request: SimulatedRequest, key: PrefixKey, pages: PageIds) -> None:
        """Insert a request's pages after its locked prefix, and move the lock to the end of the inserted prefix."""
        assert request.handle is not None, "only requests with a locked prefix are published"
        start, num_own = request.handle.num_pages, len(key.token_ids) // self.page_size
        result = self.cache.insert(key, pages[: num_own - start], request.handle)
        self.cache.lock(result.handle)
        self.cache.unlock(request.handle)
        self.pool.free(pages[: result.existing_pages - start])
        request.handle, request.own_pages = result.handle, pages[result.cached_pages - start :]

    def _end(self, request: SimulatedRequest) -> None:
        if request.handle is not None:
            if request.own_pages is not None and len(request.own_pages):
                self._publish(request, request.key, request.own_pages)
            self.cache.unlock(request.handle)
            if request.own_pages is not None:
                self.pool.free(request.own_pages)
        self.on_end(request)
