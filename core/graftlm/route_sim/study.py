"""A comparison of routing policies on recorded traces, at several numbers of replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from graftlm.cache_sim import Capacity, Choice, PageTree, Simulator, Trace, TraceClock
from graftlm.contracts import CacheContext, EvictionContext, PrefixCache, RoutingContext, RoutingPolicy
from graftlm.errors import ConfigError
from graftlm.memory import PagePool
from graftlm.records import CacheEvent
from graftlm.registry import Registry
from graftlm.route_sim.costs import StepCosts
from graftlm.route_sim.fleet import FleetRun, FleetSimulator
from graftlm.route_sim.replica import ReplicaLimits, SimulatedReplica, SimulatedRequest
from graftlm.routing import Router

__all__ = ["FleetStudy", "RouteOutcome", "RouteStudy", "TraceRouteStudy", "parse_replicas"]

#: Maximum number of simulated replicas.
_MAX_REPLICAS = 10_000

#: Maximum number of pages of all replicas together, because each page needs an entry in a table.
_MAX_PAGES = 2**28


def parse_replicas(text: str) -> list[int]:
    """Parse numbers of replicas such as `4,64,1000`. Returns: the numbers in ascending order, without duplicates.

    Raises:
        ConfigError: a number is not from 1 to 10,000.
    """
    found = set()
    for part in text.split(","):
        number = int(part) if part.strip().isascii() and part.strip().isdecimal() else 0
        if not 1 <= number <= _MAX_REPLICAS:
            raise ConfigError(f"--replicas: expected numbers from 1 to {_MAX_REPLICAS:,}, got {part.strip()!r}")
        found.add(number)
    return sorted(found)


@dataclass(frozen=True, slots=True)
class RouteOutcome:
    """The result of one policy."""

    policy: Choice
    run: FleetRun


@dataclass(frozen=True, slots=True)
class FleetStudy:
    """The results with one number of replicas.

    Attributes:
        num_replicas: number of replicas.
        one_cache_hit_tokens: number of prompt tokens that one cache with the memory of all replicas finds.
        outcomes: the result of each policy.
    """

    num_replicas: int
    one_cache_hit_tokens: int
    outcomes: tuple[RouteOutcome, ...]


@dataclass(frozen=True, slots=True)
class TraceRouteStudy:
    """The results on one trace.

    Attributes:
        trace: the trace, with the arrival times of the study.
        page_size: number of tokens in a page.
        capacity_pages: number of pages of each replica's cache.
        fleets: the results for each number of replicas.
    """

    trace: Trace
    page_size: int
    capacity_pages: int
    fleets: tuple[FleetStudy, ...]


@dataclass(frozen=True, slots=True)
class RouteStudy:
    """A comparison of routing policies.

    Attributes:
        registry: creates the plugins.
        policies: the compared policies.
        replicas: the compared numbers of replicas.
        cache, eviction: the prefix cache and the eviction strategy of each replica.
        capacity: capacity of each replica's cache; a share is a share of the trace's footprint.
        page_size: number of tokens in a page; None: the block length of each trace.
        costs: the durations of steps.
        limits: the limits of steps.
        event_delay_s: time until the router knows of a change of a cache, in seconds.
        speedup: factor by which requests arrive faster than in the trace.
        seed: seed of the policies.
    """

    registry: Registry
    policies: Sequence[Choice]
    replicas: Sequence[int]
    cache: Choice
    eviction: Choice
    capacity: Capacity
    page_size: int | None = None
    costs: StepCosts = field(default_factory=StepCosts)
    limits: ReplicaLimits = field(default_factory=ReplicaLimits)
    event_delay_s: float = 0.0
    speedup: float = 1.0
    seed: int = 0

    @property
    def num_runs(self) -> int:
        """Number of replays of each trace, with those through one cache."""
        return len(self.replicas) * (len(self.policies) + 1)

    def check(self) -> None:
        """Create each plugin once, so that wrong names and options raise before the replays.

        Raises:
            ConfigError: a name or an option of a plugin is wrong.
            PluginError: a plugin cannot be loaded or created.
        """
        for policy in self.policies:
            self._policy(policy, 1, self.page_size or 1)
        self._make_cache(16, self.page_size or 1, TraceClock(), lambda event: None)

    def run(self, trace: Trace, on_request: Callable[[], None] = lambda: None) -> TraceRouteStudy:
        """Replay one trace with all policies and numbers of replicas.

        Args:
            on_request: called after each request of each replay.

        Raises:
            ConfigError: the page size does not divide the trace's block length, or the capacity is too large.
            PluginError: a cache evicts fewer pages than it reports as evictable.
        """
        page_size = self.page_size or trace.block_tokens
        if trace.block_tokens % page_size:
            raise ConfigError(
                f"--page-size {page_size} does not divide the block length of trace {trace.name}, {trace.block_tokens} "
                "tokens. Choose another --page-size, or omit it to use one page per block."
            )
        footprint = PageTree(trace, page_size).total_pages
        pages = self.capacity.pages(footprint, page_size)
        if pages * max(self.replicas) > _MAX_PAGES:
            raise ConfigError(
                f"{max(self.replicas)} replicas with {pages} pages of {page_size} tokens are too many; at most "
                f"{_MAX_PAGES} pages can be simulated. Choose a smaller --capacity or a larger --page-size."
            )
        requests = tuple(replace(request, time_s=request.time_s / self.speedup) for request in trace.requests)
        faster = replace(trace, requests=requests)
        fleets = []
        for number in self.replicas:
            # More pages than the trace has change nothing.
            hit_tokens = self._one_cache(faster, min(number * pages, footprint), page_size, on_request)
            outcomes = [
                RouteOutcome(policy, self._simulate(faster, policy, number, pages, page_size, on_request))
                for policy in self.policies
            ]
            fleets.append(FleetStudy(number, hit_tokens, tuple(outcomes)))
        return TraceRouteStudy(faster, page_size, pages, tuple(fleets))

    def _one_cache(self, trace: Trace, num_pages: int, page_size: int, on_request: Callable[[], None]) -> int:
        """Return the number of prompt tokens that one cache finds."""
        clock = TraceClock()
        cache = self._make_cache(num_pages, page_size, clock, None)
        simulator = Simulator(cache, PagePool(num_pages), clock, trace.block_tokens, page_size)
        return simulator.run(trace.requests, on_request).hit_tokens

    def _simulate(
        self,
        trace: Trace,
        policy: Choice,
        num_replicas: int,
        pages: int,
        page_size: int,
        on_request: Callable[[], None],
    ) -> FleetRun:
        def make_router(clock: Callable[[], float]) -> Router:
            return Router(num_replicas, self._policy(policy, num_replicas, page_size), clock)

        def make_replica(
            number: int,
            listen: Callable[[CacheEvent], None],
            on_first_token: Callable[[SimulatedRequest], None],
            on_end: Callable[[SimulatedRequest], None],
        ) -> SimulatedReplica:
            clock = TraceClock()
            cache = self._make_cache(pages, page_size, clock, listen)
            pool = PagePool(pages)
            return SimulatedReplica(cache, pool, clock, page_size, self.costs, self.limits, on_first_token, on_end)

        fleet = FleetSimulator(make_router, make_replica, num_replicas, self.event_delay_s)
        return fleet.run(trace.requests, trace.block_tokens, on_request)

    def _policy(self, policy: Choice, num_replicas: int, page_size: int) -> RoutingPolicy:
        provider = self.registry.provider("routing_policy", policy.name, "--policy")
        context = RoutingContext(num_replicas, page_size, self.seed)
        made: RoutingPolicy = self.registry.create("routing_policy", provider, policy.options, context)
        return made

    def _make_cache(
        self, num_pages: int, page_size: int, clock: TraceClock, listen: Callable[[CacheEvent], None] | None
    ) -> PrefixCache:
        registry = self.registry
        provider = registry.provider("eviction", self.eviction.name, "--eviction")
        strategy = registry.create("eviction", provider, self.eviction.options, EvictionContext(num_pages, page_size))
        context = CacheContext(page_size, strategy, clock, on_event=listen)
        cache_provider = registry.provider("cache", self.cache.name, "--cache")
        made: PrefixCache = registry.create("cache", cache_provider, self.cache.options, context)
        return made
