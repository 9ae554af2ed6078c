"""The server's metrics: latencies of requests, and counters that the replicas report."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from graftlm.outputs import GatheredOutput
from graftlm.processes.replicas import Replica, ReplicaSet
from graftlm.processes.request_metrics import RequestMetrics
from graftlm.processes.step_metrics import STEP_BUCKETS_S, STEP_HISTOGRAMS
from graftlm.records import EngineStats, StateStats, TierStats

__all__ = ["ServerMetrics", "make_router"]

_TOKEN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

#: Name, help text, and a function that reads the value from a replica's report.
_COUNTERS: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("prompt_tokens", "Number of prompt tokens of queued requests.", lambda s: s.prompt_tokens),
    ("generated_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    ("evicted_tokens", "Number of tokens whose keys and values were evicted.", lambda s: s.evicted_tokens),
    (
        "retracted_tokens",
        "Number of tokens that were computed for requests that were then retracted.",
        lambda s: s.retracted_tokens,
    ),
    ("retractions", "Number of times that a running request was retracted.", lambda s: s.retractions),
    (
        "aged_requests",
        "Number of requests that were admitted first because the policy had passed them over for too long.",
        lambda s: s.aged_requests,
    ),
    ("steps", "Forward passes.", lambda s: s.steps),
    (
        "jump_forward_tokens",
        "Number of generated tokens that were not sampled, because a grammar forced them.",
        lambda s: s.jump_forward_tokens,
    ),
    (
        "grammar_hits",
        "Number of requests whose grammar had been compiled before, or was being compiled.",
        lambda s: s.grammar_hits,
    ),
    ("grammar_misses", "Number of requests whose grammar had to be compiled.", lambda s: s.grammar_misses),
)
_GAUGES: Final[tuple[tuple[str, str, Callable[[EngineStats], float]], ...]] = (
    ("running_requests", "Number of requests in the batch.", lambda s: s.running_requests),
    ("queued_requests", "Number of waiting requests.", lambda s: s.waiting_requests),
)
_PAGE_STATES: Final[tuple[tuple[str, Callable[[EngineStats], int]], ...]] = (
    ("free", lambda s: s.free_pages),
    ("evictable", lambda s: s.evictable_pages),
    ("locked", lambda s: s.locked_pages),
    ("owned", lambda s: s.owned_pages),
)

_TIER_EVENTS: Final[tuple[tuple[str, Callable[[TierStats], int]], ...]] = (
    ("stored", lambda t: t.stored_blocks),
    ("loaded", lambda t: t.loaded_blocks),
    ("evicted", lambda t: t.evicted_blocks),
    ("skipped_store", lambda t: t.skipped_stores),
    ("lost_copy", lambda t: t.lost_copies),
    ("prefetched", lambda t: t.prefetched_blocks),
    ("skipped_write", lambda t: t.skipped_writes),
)
_STORAGE_EVENTS: Final[tuple[tuple[str, Callable[[TierStats], int]], ...]] = (
    ("stored", lambda t: t.storage_stored),
    ("hit", lambda t: t.storage_hits),
    ("miss", lambda t: t.storage_misses),
    ("evicted", lambda t: t.storage_evicted),
    ("corrupt", lambda t: t.storage_corrupt),
    ("foreign", lambda t: t.storage_foreign),
    ("failure", lambda t: t.storage_failures),
)


class ServerMetrics:
    """Every metric of a server, in one registry of the main process.

    The other processes report to the main process, so the processes share no counters and nothing is counted twice. The
    counters of a replica have its name as a label. A restarted replica counts from 0, as Prometheus expects.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._others: list[RequestMetrics] = []
        self._first = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            _REQUEST_BUCKETS_S,
        )
        self._gap = self._histogram(
            "inter_token_seconds",
            "Seconds between two tokens of a request. If n tokens arrive together, each counts with 1/n of the time.",
            _TOKEN_BUCKETS_S,
        )
        self._whole = self._histogram(
            "request_seconds", "Seconds from the arrival of a request to its end.", _REQUEST_BUCKETS_S
        )
        self._queue = self._histogram(
            "queue_seconds",
            "Seconds from the arrival of a request in the scheduler to its admission.",
            _REQUEST_BUCKETS_S,
        )
        self._finished = Counter(
            "requests_finished",
            "Number of prompts that have ended, by reason.",
            ("reason",),
            "graftlm",
            registry=self.registry,
        )

    def watch(self, replicas: ReplicaSet) -> None:
        """Include the reports of these replicas in the metrics from now on."""
        self.registry.register(_ReplicaCollector(replicas.replicas))

    def forward(self, others: Iterable[RequestMetrics]) -> None:
        """Pass every measurement to these parts too, from now on."""
        self._others += others

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival in the server to its first token."""
        self._first.observe(seconds)
        for other in self._others:
            other.first_token(seconds)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record later tokens of a request.

        Args:
            seconds: time since the request's previous tokens.
            num_tokens: number of tokens that arrived together.
        """
        each = seconds / num_tokens
        for _ in range(num_tokens):
            self._gap.observe(each)
        for other in self._others:
            other.more_tokens(seconds, num_tokens)

    def finished(self, output: GatheredOutput, seconds: float, outcome: str) -> None:
        """Record the end of a prompt.

        Args:
            seconds: time from the request's arrival to its end.
            outcome: value of the metric's label, such as a finish reason.
        """
        self._finished.labels(outcome).inc()
        self._whole.observe(seconds)
        if output.timings.queue_s is not None:
            self._queue.observe(output.timings.queue_s)
        for other in self._others:
            other.finished(output, seconds, outcome)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that an Accept header requests, and their content type."""
        if "application/openmetrics-text" in accept:
            # With the default escaping, samples have "_" where the names of aliases have ":".
            body: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
                self.registry, escaping=openmetrics.ALLOWUTF8
            )
            return body, openmetrics.CONTENT_TYPE_LATEST
        return exposition.generate_latest(self.registry), exposition.CONTENT_TYPE_PLAIN_0_0_4

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, text, namespace="graftlm", buckets=bounds, registry=self.registry)


class _ReplicaCollector(Collector):
    """Converts the replicas' latest reports into metrics."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterable[Metric]:
        """Yield one family per metric, with a sample for each replica that has reported."""
        up = GaugeMetricFamily("graftlm_replica_up", "1 if a replica accepts requests, else 0.", labels=["replica"])
        for replica in self._replicas:
            up.add_metric([replica.name], float(replica.ready))
        yield up
        reports = {r.name: r.load.stats for r in self._replicas if r.load is not None}
        for name, text, read in _COUNTERS:
            yield _family(CounterMetricFamily, name, text, {(n,): read(s) for n, s in reports.items()})
        for name, text, read in _GAUGES:
            yield _family(GaugeMetricFamily, name, text, {(n,): read(s) for n, s in reports.items()})
        yield from _caches(reports)
        yield from _drafts(reports)
        yield from _tiers({n: s.tiers for n, s in reports.items() if s.tiers is not None})
        yield from _states({n: s.states for n, s in reports.items() if s.states is not None})
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        for name, text in STEP_HISTOGRAMS.items():
            family = HistogramMetricFamily(f"graftlm_{name}", text, labels=["replica"])
            for replica in self._replicas:
                if replica.load is not None and name in replica.load.histograms:
                    counts, total = replica.load.histograms[name]
                    family.add_metric([replica.name], _cumulated(counts), total)
            yield family


def _caches(reports: dict[str, EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of the KV cache. Some have another label in addition to the replica's name."""
    cached: dict[tuple[str, str], int] = {}
    for name, stats in reports.items():
        lower = {"host": stats.cached_host_tokens, "storage": stats.cached_storage_tokens}
        cached[name, "device"] = stats.cached_tokens - sum(lower.values())
        cached |= {(name, tier): tokens for tier, tokens in lower.items() if stats.tiers is not None}
    text = "Number of prompt tokens that were not computed because their keys and values were cached, by tier."
    yield _family(CounterMetricFamily, "cached_tokens", text, cached, "tier")
    pages = {(name, state): read(stats) for name, stats in reports.items() for state, read in _PAGE_STATES}
    yield _family(GaugeMetricFamily, "kv_pages", "Number of pages of KV memory, by state.", pages, "state")
    ages = {(name,): stats.eviction_age_s for name, stats in reports.items() if stats.eviction_age_s is not None}
    text = "Seconds between the last use of the last evicted page and its eviction."
    yield _family(GaugeMetricFamily, "eviction_age_seconds", text, ages)


def _drafts(reports: dict[str, EngineStats]) -> Iterator[Metric]:
    """Yield the metrics of speculation, by drafter."""
    drafts = {(name, drafter): counts for name, s in reports.items() for drafter, counts in s.drafts.items()}
    if not drafts:
        return
    text = "Number of drafted tokens that a step verified, by drafter."
    yield _family(CounterMetricFamily, "drafted_tokens", text, {k: v[0] for k, v in drafts.items()}, "drafter")
    text = "Number of drafted tokens that were accepted, by drafter."
    yield _family(CounterMetricFamily, "accepted_draft_tokens", text, {k: v[1] for k, v in drafts.items()}, "drafter")


def _tiers(reports: dict[str, TierStats]) -> Iterator[Metric]:
    """Yield the metrics of the cache's lower tiers, if there are any."""
    if not reports:
        return
    blocks = {(name, "host"): tiers.host_used_blocks for name, tiers in reports.items()}
    blocks |= {(name, "storage"): tiers.storage_blocks for name, tiers in reports.items()}
    yield _family(GaugeMetricFamily, "tier_blocks", "Number of stored blocks, by tier.", blocks, "tier")
    capacity = {(name,): tiers.host_blocks for name, tiers in reports.items()}
    yield _family(GaugeMetricFamily, "host_capacity_blocks", "Number of blocks that fit into host memory.", capacity)
    late = {(name,): tiers.late_prefetches for name, tiers in reports.items()}
    text = "Number of requests that were admitted before all of their blocks had been read from storage."
    yield _family(CounterMetricFamily, "late_prefetches", text, late)
    for tier, table in (("host", _TIER_EVENTS), ("storage", _STORAGE_EVENTS)):
        events = {(name, event): read(tiers) for name, tiers in reports.items() for event, read in table}
        text = f"Number of events of blocks in the cache's {tier} tier, by kind."
        yield _family(CounterMetricFamily, f"{tier}_events", text, events, "event")


def _states(reports: dict[str, StateStats]) -> Iterator[Metric]:
    """Yield the metrics of stored recurrent states, if the model has such states."""
    if not reports:
        return
    uses = {(name, "stored"): states.num_stored for name, states in reports.items()}
    uses |= {(name, "free"): states.num_free for name, states in reports.items()}
    uses |= {(n, "running"): s.num_snapshots - s.num_stored - s.num_free for n, s in reports.items()}
    text = "Number of slots for recurrent states beside those of the rows, by use."
    yield _family(GaugeMetricFamily, "state_slots", text, uses, "use")
    stores = {(name,): states.num_stores for name, states in reports.items()}
    yield _family(CounterMetricFamily, "stored_states", "Number of recurrent states that were stored.", stores)
    evicted = {(name,): states.num_evicted for name, states in reports.items()}
    text = "Number of stored recurrent states that were evicted while their page stayed cached."
    yield _family(CounterMetricFamily, "evicted_states", text, evicted)


def _family(kind: Callable[..., Any], name: str, text: str, values: Mapping[Any, float], *labels: str) -> Metric:
    family = kind(f"graftlm_{name}", text, labels=["replica", *labels])
    for key, value in values.items():
        family.add_metric(list(key), value)
    metric: Metric = family
    return metric


def _cumulated(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return [(upper bound, number of observations up to it)], the form that Prometheus uses."""
    bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
    total, cumulated = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        cumulated.append((bound, float(total)))
    return cumulated


def make_router(metrics: ServerMetrics) -> APIRouter:
    """Return a router with the route from which Prometheus reads the metrics."""
    router = APIRouter(tags=["information"])

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def read_metrics(request: Request) -> Response:
        body, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return router
