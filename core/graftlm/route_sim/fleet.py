"""Replays a trace over simulated replicas, with the server's router."""

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from graftlm.cache_sim import TraceRequest
from graftlm.contracts import PrefixKey
from graftlm.records import CacheEvent
from graftlm.route_sim.replica import ReplicaTotals, SimulatedReplica, SimulatedRequest
from graftlm.routing import BlockLedger, Router

__all__ = ["FleetRun", "FleetSimulator"]

#: Creates replica `number`; the replica calls the functions with the changes of its cache and its requests.
MakeReplica = Callable[
    [
        int,
        Callable[[CacheEvent], None],
        Callable[[SimulatedRequest], None],
        Callable[[SimulatedRequest], None],
    ],
    SimulatedReplica,
]


@dataclass(slots=True)
class FleetRun:
    """The figures of a replay.

    Attributes:
        prompt_tokens: number of prompt tokens of all requests.
        replicas: the figures of each replica.
        ttft_s: time to first token of each request, in seconds of simulated time.
        decision_ns: time for `Router.choose` and `Router.sent` of each request, in nanoseconds of real time.
    """

    prompt_tokens: int = 0
    replicas: list[ReplicaTotals] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    decision_ns: list[int] = field(default_factory=list)

    @property
    def hit_tokens(self) -> int:
        """Number of prompt tokens that were found in the caches."""
        return sum(replica.hit_tokens for replica in self.replicas)

    def busiest_over_mean(self, figure: Callable[[ReplicaTotals], float]) -> float:
        """Return the largest figure of a replica, divided by the mean of all replicas; 1 if all are 0."""
        values = [figure(replica) for replica in self.replicas]
        return max(values) * len(values) / sum(values) if any(values) else 1.0


class FleetSimulator:
    """A discrete-event simulation of a router and its replicas.

    Args:
        make_router: creates the router, given its clock.
        make_replica: creates a replica.
        num_replicas: number of replicas.
        event_delay_s: time from a change of a cache to its report at the router, in seconds of simulated time.
        timer: returns the real time in nanoseconds.
    """

    def __init__(
        self,
        make_router: Callable[[Callable[[], float]], Router],
        make_replica: MakeReplica,
        num_replicas: int,
        event_delay_s: float = 0.0,
        timer: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._now_s = 0.0
        self._router = make_router(lambda: self._now_s)
        self._router.states.ready[:] = True
        self._event_delay_s = event_delay_s
        self._timer = timer
        self._run = FleetRun()
        self._ends: list[tuple[float, int, int]] = []  # (end of current steps, order, replica)
        self._end_order = [0] * num_replicas  # order of each replica's valid entry in `_ends`
        self._order = 0
        self._reports: deque[tuple[float, int, str, Sequence[int]]] = deque()  # due time, replica, change
        self._replicas = [
            make_replica(number, self._listener(number), self._first_token, self._ended)
            for number in range(num_replicas)
        ]
        self._run.replicas = [replica.totals for replica in self._replicas]

    def run(
        self, requests: Iterable[TraceRequest], block_tokens: int, on_request: Callable[[], None] = lambda: None
    ) -> FleetRun:
        """Replay requests in order, until all have ended.

        Args:
            requests: the requests, in ascending order of time.
            block_tokens: number of tokens in a block of the trace.
            on_request: called after each arrival.
        """
        for recorded in requests:
            self._run_until(recorded.time_s)
            self._arrive(recorded, block_tokens)
            on_request()
        self._run_until(float("inf"))
        return self._run

    def _arrive(self, recorded: TraceRequest, block_tokens: int) -> None:
        self._now_s = recorded.time_s
        self._deliver()
        token_ids = recorded.token_ids(block_tokens)
        route = self._router.route(token_ids[: recorded.prompt_tokens], recorded.namespace)
        started = self._timer()
        number = self._router.choose(route)
        assert number is not None, "all replicas are ready"
        self._router.sent(route, number)
        self._run.decision_ns.append(self._timer() - started)
        self._run.prompt_tokens += recorded.prompt_tokens
        key = PrefixKey(token_ids, recorded.namespace, recorded.priority)
        request = SimulatedRequest(recorded, route, key, max(1, recorded.output_tokens))
        self._schedule(number, self._replicas[number].add(request, self._now_s))

    def _run_until(self, limit_s: float) -> None:
        """Run all steps that end until a moment."""
        while self._ends and self._ends[0][0] <= limit_s:
            end_s, order, number = heapq.heappop(self._ends)
            if order == self._end_order[number]:
                self._now_s = end_s
                self._schedule(number, self._replicas[number].advance(end_s))

    def _schedule(self, number: int, end_s: float | None) -> None:
        if end_s is not None:
            self._order += 1
            self._end_order[number] = self._order
            heapq.heappush(self._ends, (end_s, self._order, number))

    def _listener(self, number: int) -> Callable[[CacheEvent], None]:
        """Return the function that gets the events of a replica's cache."""
        block_tokens = self._router.event_block_tokens
        if block_tokens is None:
            return lambda event: None
        ledger = BlockLedger(block_tokens)

        def listen(event: CacheEvent) -> None:
            change = ledger.apply(event)
            if change is not None:
                self._reports.append((self._now_s + self._event_delay_s, number, change.kind, change.digests))

        return listen

    def _deliver(self) -> None:
        """Report the changes of caches that are due. Replicas without changes report their load."""
        self._router.states.reported_s[:] = self._now_s - self._event_delay_s
        while self._reports and self._reports[0][0] <= self._now_s:
            _, number, kind, digests = self._reports.popleft()
            self._router.report(number, [(kind, digests)])

    def _first_token(self, request: SimulatedRequest) -> None:
        self._run.ttft_s.append(self._now_s - request.recorded.time_s)
        self._router.started(request.route)

    def _ended(self, request: SimulatedRequest) -> None:
        self._router.ended(request.route, request.num_outputs)
