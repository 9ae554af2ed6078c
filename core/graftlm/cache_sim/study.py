"""A comparison of caches and eviction strategies on recorded traces, at several capacities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from graftlm.cache_sim.belady import Optimum, offline_optimum
from graftlm.cache_sim.choices import Capacity, Choice
from graftlm.cache_sim.page_tree import PageTree
from graftlm.cache_sim.simulator import Replay, Simulator, TraceClock
from graftlm.cache_sim.traces import Trace
from graftlm.contracts import CacheContext, EvictionContext, PrefixCache
from graftlm.errors import ConfigError
from graftlm.memory import PagePool
from graftlm.registry import Registry

__all__ = ["CapacityStudy", "Outcome", "Study", "TraceStudy"]


#: Maximum number of pages in a replayed cache, because each page needs an entry in a table.
_MAX_PAGES = 2**28

#: Capacity in pages of the caches that are created only to check options.
_CHECK_PAGES = 1024


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one cache with one eviction strategy at one capacity."""

    cache: Choice
    eviction: Choice
    replay: Replay


@dataclass(frozen=True, slots=True)
class CapacityStudy:
    """The results of a study at one capacity.

    Attributes:
        asked: the capacity as given on the command line.
        pages: the capacity in pages.
        optimum: the figures of the offline optimum.
        outcomes: the result of each pair of cache and strategy.
    """

    asked: str
    pages: int
    optimum: Optimum
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class TraceStudy:
    """The results of a study on one trace.

    Attributes:
        trace: the trace.
        page_size: number of tokens in a page.
        in_flight: see `Simulator`.
        footprint_pages: number of pages in all distinct blocks of the trace.
        capacities: the results at each capacity, in ascending order, without duplicates.
    """

    trace: Trace
    page_size: int
    in_flight: int
    footprint_pages: int
    capacities: tuple[CapacityStudy, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """A comparison of all pairs of caches and eviction strategies at several capacities.

    Attributes:
        registry: creates the plugins.
        caches: the compared prefix caches.
        evictions: the compared eviction strategies.
        capacities: the compared capacities.
        page_size: number of tokens in a page; None: the block length of each trace.
        in_flight: see `Simulator`.
    """

    registry: Registry
    caches: Sequence[Choice]
    evictions: Sequence[Choice]
    capacities: Sequence[Capacity]
    page_size: int | None = None
    in_flight: int = 0

    @property
    def num_replays(self) -> int:
        """Number of replays of each trace, without the offline optimum."""
        return len(self.capacities) * len(self.caches) * len(self.evictions)

    def check(self) -> None:
        """Create each plugin once, so that wrong names and options raise before the replays.

        Raises:
            ConfigError: a name or an option of a plugin is wrong.
            PluginError: a plugin cannot be loaded or created.
        """
        for cache, eviction in product(self.caches, self.evictions):
            self._make_cache(cache, eviction, _CHECK_PAGES, self.page_size or 1, TraceClock())

    def run(self, trace: Trace, on_request: Callable[[], None] = lambda: None) -> TraceStudy:
        """Replay one trace through all pairs of caches and strategies at all capacities.

        Args:
            on_request: called after each request of each replay.

        Raises:
            ConfigError: the page size does not divide the trace's block length, or a capacity is too large.
            PluginError: a cache evicts fewer pages than it reports as evictable.
        """
        page_size = self._page_size(trace)
        tree = PageTree(trace, page_size)
        for capacity in self.capacities:
            _check_capacity(capacity, capacity.pages(tree.total_pages, page_size), page_size)
        asked = {capacity.pages(tree.total_pages, page_size): capacity.text for capacity in self.capacities}
        found = []
        for pages, text in sorted(asked.items()):
            outcomes = [
                Outcome(cache, eviction, self._replay(trace, cache, eviction, pages, page_size, on_request))
                for cache, eviction in product(self.caches, self.evictions)
            ]
            found.append(CapacityStudy(text, pages, offline_optimum(tree, pages, self.in_flight), tuple(outcomes)))
        return TraceStudy(trace, page_size, self.in_flight, tree.total_pages, tuple(found))

    def _page_size(self, trace: Trace) -> int:
        page_size = self.page_size or trace.block_tokens
        if trace.block_tokens % page_size:
            raise ConfigError(
                f"--page-size {page_size} does not divide the block length of trace {trace.name}, {trace.block_tokens} "
                "tokens. Choose another --page-size, or omit it to use one page per block."
            )
        return page_size

    def _replay(
        self,
        trace: Trace,
        cache: Choice,
        eviction: Choice,
        num_pages: int,
        page_size: int,
        on_request: Callable[[], None],
    ) -> Replay:
        clock = TraceClock()
        under_test = self._make_cache(cache, eviction, num_pages, page_size, clock)
        pool = PagePool(num_pages)
        simulator = Simulator(under_test, pool, clock, trace.block_tokens, page_size, self.in_flight)
        return simulator.run(trace.requests, on_request)

    def _make_cache(
        self, cache: Choice, eviction: Choice, num_pages: int, page_size: int, clock: TraceClock
    ) -> PrefixCache:
        registry = self.registry
        strategy = registry.create(
            "eviction",
            registry.provider("eviction", eviction.name, "--eviction"),
            eviction.options,
            EvictionContext(num_pages, page_size),
        )
        context = CacheContext(page_size, strategy, clock)
        provider = registry.provider("cache", cache.name, "--cache")
        made: PrefixCache = registry.create("cache", provider, cache.options, context)
        return made


def _check_capacity(capacity: Capacity, num_pages: int, page_size: int) -> None:
    if num_pages > _MAX_PAGES:
        raise ConfigError(
            f"capacity {capacity.text} is {num_pages:.3g} pages of {page_size} tokens; at most {_MAX_PAGES} pages can "
            "be replayed. Choose a smaller --capacity or a larger --page-size."
        )
