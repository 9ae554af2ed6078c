"""The reference of metrics: every family that a server can expose, with its type, labels and help."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import Metric

from docs_reference.markdown import code, plain, table
from graftlm.outputs import GatheredOutput
from graftlm.processes.messages import Load
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.step_metrics import StepMetrics
from graftlm.records import EngineStats, StateStats, TierStats
from graftlm.server.metrics import ServerMetrics
from graftlm.types import Completion, FinishReason, Timings, Usage

__all__ = ["metric_families", "metrics_page"]

_HEAD = """\
# Metric reference

This page lists the metrics of `GET /metrics`. [Metrics](../metrics.md) explains where they are measured, the reasons,
and which ones to monitor.
"""


def metric_families() -> Iterator[Metric]:
    """Yield every metric of a server that has answered a request and whose cache has lower tiers and states."""
    replicas = ReplicaSet(["scheduler-0"], can_recover=False)
    values: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    states = StateStats(num_snapshots=0, num_stored=0, num_free=0, num_stores=0, num_evicted=0)
    values |= {"eviction_age_s": 0.0, "tiers": TierStats(), "drafts": {"suffix": (0, 0)}, "states": states}
    replicas.replicas[0].load = Load(
        process="scheduler-0", stats=EngineStats(**values), histograms=StepMetrics().snapshot()
    )
    metrics = ServerMetrics()
    metrics.watch(replicas)
    metrics.finished(_answer(), 1.0, FinishReason.STOP.value)
    yield from metrics.registry.collect()


def metrics_page() -> str:
    """Return the page, metrics in alphabetical order."""
    rows = [
        [code(exposed_name(metric)), metric.type, ", ".join(map(code, _labels(metric))), plain(metric.documentation)]
        for metric in sorted(metric_families(), key=lambda metric: metric.name)
    ]
    return f"{_HEAD}\n{table(['Metric', 'Type', 'Labels', 'Meaning'], rows)}"


def exposed_name(metric: Metric) -> str:
    """Return the name of a metric in Prometheus queries; a counter's name ends in `_total`."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _labels(metric: Metric) -> list[str]:
    return sorted({label for sample in metric.samples for label in sample.labels} - {"le"})


def _answer() -> GatheredOutput:
    completion = Completion(index=0, text="", token_ids=(1,), finish_reason=FinishReason.STOP)
    timings = Timings(queue_s=0.0, first_token_s=0.0, total_s=0.0)
    return GatheredOutput((completion,), Usage(1, 1, 0), timings)
