"""Metrics under the names, labels and buckets of vLLM and SGLang, for dashboards and routers that read those."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graftlm.outputs import GatheredOutput
from graftlm.processes.replicas import Replica
from graftlm.processes.request_metrics import RequestMetrics
from graftlm.records import EngineStats
from graftlm.server.dashboard.history import Point

__all__ = ["AliasSource", "add_aliases"]

# fmt: off
_VLLM_FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)
_VLLM_TOKEN_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_VLLM_REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
_SGLANG_FIRST_TOKEN_S: Final = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
)
_SGLANG_TOKEN_S: Final = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0,
    2.0, 4.0, 6.0, 8.0,
)
_SGLANG_REQUEST_S: Final = (*_SGLANG_FIRST_TOKEN_S, 600.0, 1200.0, 1800.0, 2400.0)
_SGLANG_QUEUE_S: Final = (
    0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0,
    200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0,
    3000.0,
)
# fmt: on

#: Our reasons for the end of a prompt -> vLLM's. The other reasons are "error".
_VLLM_REASONS: Final = {"stop": "stop", "length": "length", "abort": "abort"}
#: A prompt with this outcome was never queued. vLLM and SGLang do not count such prompts.
_REJECTED: Final = "rejected"


@dataclass(frozen=True, slots=True)
class AliasSource:
    """The values that the aliases have in addition to the measured requests.

    Attributes:
        model_name: value of the label `model_name`.
        context_len: upper limit of the buckets that count tokens.
        page_size: tokens in a KV page.
        replicas: the replicas, whose latest reports have the counters.
        latest: returns the server's latest rates; None before the first point.
    """

    model_name: str
    context_len: int
    page_size: int
    replicas: Sequence[Replica]
    latest: Callable[[], Point | None]


def add_aliases(
    names: Iterable[Literal["vllm", "sglang"]], source: AliasSource, registry: CollectorRegistry
) -> list[RequestMetrics]:
    """Register the metrics of these servers.

    Returns: the parts that must measure every request.
    """
    makers: dict[str, Callable[[AliasSource, CollectorRegistry], RequestMetrics]]
    makers = {"vllm": _VllmMetrics, "sglang": _SglangMetrics}
    return [makers[name](source, registry) for name in dict.fromkeys(names)]


@dataclass(frozen=True, slots=True)
class _Alias:
    """A metric that is read from a replica's report.

    Attributes:
        kind: counter or gauge.
        name: name without "_total".
        read: value in a report; None if the report has none, such as drafts without speculation.
    """

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    read: Callable[[EngineStats], float | None]


class _VllmMetrics:
    """vLLM's metrics. Those of replicas have its label `engine`, the index of the replica."""

    def __init__(self, source: AliasSource, registry: CollectorRegistry) -> None:
        make = _Histograms("vllm", source.model_name, registry)
        self._first = make("time_to_first_token_seconds", "Time to first token.", _VLLM_FIRST_TOKEN_S)
        self._gap = make("inter_token_latency_seconds", "Time between two tokens.", _VLLM_TOKEN_S)
        self._per_token = make(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", _VLLM_TOKEN_S
        )
        self._whole = make("e2e_request_latency_seconds", "Time of a request.", _VLLM_REQUEST_S)
        self._queue = make("request_queue_time_seconds", "Time in the queue.", _VLLM_REQUEST_S)
        self._inference = make("request_inference_time_seconds", "Time from admission to the end.", _VLLM_REQUEST_S)
        self._prefill = make("request_prefill_time_seconds", "Time from admission to the first token.", _VLLM_REQUEST_S)
        self._decode = make("request_decode_time_seconds", "Time from the first token to the end.", _VLLM_REQUEST_S)
        sizes = _one_two_five(source.context_len)
        self._prompt_tokens = make("request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self._output_tokens = make("request_generation_tokens", "Generated tokens of a completion.", sizes)
        self._longest = make(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest completion.", sizes
        )
        self._ended = Counter(
            "vllm:request_success", "Requests that ended, by reason.", ("model_name", "finished_reason"),
            registry=registry,
        )  # fmt: skip
        self._model_name = source.model_name
        registry.register(_ReplicaAliases(_VLLM, "engine", source))

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        _observe_gaps(self._gap, seconds, num_tokens)

    def finished(self, output: GatheredOutput, seconds: float, outcome: str) -> None:
        self._whole.observe(seconds)
        timings = output.timings
        if timings.queue_s is not None:
            self._queue.observe(timings.queue_s)
        if outcome == _REJECTED:
            return
        self._ended.labels(self._model_name, _VLLM_REASONS.get(outcome, "error")).inc()
        self._prompt_tokens.observe(output.usage.prompt_tokens)
        lengths = [len(completion.token_ids) for completion in output.completions]
        for length in lengths:
            self._output_tokens.observe(length)
        self._longest.observe(max(lengths, default=0))
        queue_s, first_s, total_s = timings.queue_s, timings.first_token_s, timings.total_s
        if queue_s is None or first_s is None or total_s is None:
            return
        self._inference.observe(total_s - queue_s)
        self._prefill.observe(first_s - queue_s)
        self._decode.observe(total_s - first_s)
        if max(lengths, default=0) > 1:
            self._per_token.observe((total_s - first_s) / (max(lengths) - 1))


class _SglangMetrics:
    """SGLang's metrics. Those of replicas have its label `dp_rank`, the index of the replica."""

    def __init__(self, source: AliasSource, registry: CollectorRegistry) -> None:
        make = _Histograms("sglang", source.model_name, registry)
        self._first = make("time_to_first_token_seconds", "Time to first token.", _SGLANG_FIRST_TOKEN_S)
        self._gap = make("inter_token_latency_seconds", "Time between two tokens.", _SGLANG_TOKEN_S)
        self._whole = make("e2e_request_latency_seconds", "Time of a request.", _SGLANG_REQUEST_S)
        self._queue = make("queue_time_seconds", "Time in the queue.", _SGLANG_QUEUE_S)
        labels = ("model_name",)
        self._requests = Counter("sglang:num_requests", "Requests that ended.", labels, registry=registry)
        self._aborted = Counter("sglang:num_aborted_requests", "Aborted requests.", labels, registry=registry)
        self._model_name = source.model_name
        for counter in (self._requests, self._aborted):
            counter.labels(source.model_name)  # 0 before the first request
        registry.register(_ReplicaAliases(_sglang(source.page_size), "dp_rank", source))
        registry.register(_SglangRates(source))

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        _observe_gaps(self._gap, seconds, num_tokens)

    def finished(self, output: GatheredOutput, seconds: float, outcome: str) -> None:
        self._whole.observe(seconds)
        if output.timings.queue_s is not None:
            self._queue.observe(output.timings.queue_s)
        if outcome != _REJECTED:
            self._requests.labels(self._model_name).inc()
        if outcome == "abort":
            self._aborted.labels(self._model_name).inc()


class _Histograms:
    """Makes the histograms of one server, with the label `model_name`."""

    def __init__(self, prefix: str, model_name: str, registry: CollectorRegistry) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._registry = registry

    def __call__(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        full = f"{self._prefix}:{name}"
        family = Histogram(full, text, ("model_name",), buckets=bounds, registry=self._registry)
        return family.labels(self._model_name)


class _ReplicaAliases(Collector):
    """Converts the replicas' latest reports into metrics with other names."""

    def __init__(self, aliases: Sequence[_Alias], rank_label: str, source: AliasSource) -> None:
        self._aliases = aliases
        self._labels = ["model_name", rank_label]
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield one family per metric that has a value, with a sample for each replica that has reported."""
        replicas = enumerate(self._source.replicas)
        reports = {str(rank): replica.load.stats for rank, replica in replicas if replica.load is not None}
        for alias in self._aliases:
            values = {rank: alias.read(stats) for rank, stats in reports.items()}
            present = {rank: value for rank, value in values.items() if value is not None}
            if present:
                yield _family(alias, self._labels, {(self._source.model_name, rank): v for rank, v in present.items()})


class _SglangRates(Collector):
    """SGLang's gauges over the last seconds, for the whole server."""

    def __init__(self, source: AliasSource) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges. Those of speculation have no value while nothing is drafted."""
        point = self._source.latest()
        if point is None:
            return
        rates: tuple[tuple[str, str, float | None], ...] = (
            ("gen_throughput", "Generated tokens per second.", point.generated_tokens_per_s),
            ("cache_hit_rate", "Share of prompt tokens that were cached.", point.hit_rate or 0.0),
            ("spec_accept_length", "Tokens per decode step of a request.", point.accept_len),
            ("spec_accept_rate", "Share of drafted tokens that were accepted.", point.accept_rate),
        )
        for name, text, value in rates:
            if value is not None:
                family = GaugeMetricFamily(f"sglang:{name}", text, labels=["model_name"])
                family.add_metric([self._source.model_name], value)
                yield family


def _family(alias: _Alias, labels: list[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family: Any = alias.kind(alias.name, alias.text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    metric: Metric = family
    return metric


def _observe_gaps(histogram: Histogram, seconds: float, num_tokens: int) -> None:
    for _ in range(num_tokens):
        histogram.observe(seconds / num_tokens)


def _one_two_five(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20 and so on, up to `largest`: vLLM's buckets for numbers of tokens."""
    bounds: list[float] = []
    power = 1
    while power <= largest:
        bounds += [factor * power for factor in (1, 2, 5) if factor * power <= largest]
        power *= 10
    return bounds


def _usage(stats: EngineStats) -> float:
    """Return the share of KV pages that running requests use, from 0 to 1."""
    return (stats.locked_pages + stats.owned_pages) / max(1, stats.total_pages)


def _drafted(stats: EngineStats) -> float | None:
    return sum(drafted for drafted, _ in stats.drafts.values()) if stats.drafts else None


def _accepted(stats: EngineStats) -> float | None:
    return sum(accepted for _, accepted in stats.drafts.values()) if stats.drafts else None


# fmt: off
_VLLM: Final = (
    _Alias(GaugeMetricFamily, "vllm:num_requests_running", "Requests in the batch.", lambda s: s.running_requests),
    _Alias(GaugeMetricFamily, "vllm:num_requests_waiting", "Requests that wait.", lambda s: s.waiting_requests),
    _Alias(GaugeMetricFamily, "vllm:kv_cache_usage_perc", "Share of KV memory in use, 0 to 1.", _usage),
    _Alias(CounterMetricFamily, "vllm:prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens),
    _Alias(CounterMetricFamily, "vllm:prompt_tokens_cached", "Cached prompt tokens.", lambda s: s.cached_tokens),
    _Alias(CounterMetricFamily, "vllm:generation_tokens", "Generated tokens.", lambda s: s.generated_tokens),
    _Alias(CounterMetricFamily, "vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prompt_tokens),
    _Alias(CounterMetricFamily, "vllm:prefix_cache_hits", "Cached prompt tokens.", lambda s: s.cached_tokens),
    _Alias(CounterMetricFamily, "vllm:num_preemptions", "Retractions.", lambda s: s.retractions),
    _Alias(CounterMetricFamily, "vllm:spec_decode_num_draft_tokens", "Drafted tokens.", _drafted),
    _Alias(CounterMetricFamily, "vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens.", _accepted),
)
# fmt: on


def _sglang(page_size: int) -> tuple[_Alias, ...]:
    # fmt: off
    return (
        _Alias(GaugeMetricFamily, "sglang:num_running_reqs", "Requests in the batch.", lambda s: s.running_requests),
        _Alias(GaugeMetricFamily, "sglang:num_queue_reqs", "Requests that wait.", lambda s: s.waiting_requests),
        _Alias(
            GaugeMetricFamily, "sglang:num_used_tokens", "Tokens of KV memory in use.",
            lambda s: (s.locked_pages + s.owned_pages) * page_size,
        ),
        _Alias(
            GaugeMetricFamily, "sglang:max_total_num_tokens", "Capacity of KV memory in tokens.",
            lambda s: s.total_pages * page_size,
        ),
        _Alias(GaugeMetricFamily, "sglang:token_usage", "Share of KV memory in use, 0 to 1.", _usage),
        _Alias(CounterMetricFamily, "sglang:prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens),
        _Alias(CounterMetricFamily, "sglang:generation_tokens", "Generated tokens.", lambda s: s.generated_tokens),
        _Alias(CounterMetricFamily, "sglang:cached_tokens", "Cached prompt tokens.", lambda s: s.cached_tokens),
        _Alias(CounterMetricFamily, "sglang:num_retracted_requests", "Retractions.", lambda s: s.retractions),
        _Alias(
            CounterMetricFamily, "sglang:num_grammar", "Requests with a grammar.",
            lambda s: s.grammar_hits + s.grammar_misses,
        ),
        _Alias(
            CounterMetricFamily, "sglang:num_grammar_cache_hit", "Requests with a compiled grammar.",
            lambda s: s.grammar_hits,
        ),
    )
    # fmt: on
