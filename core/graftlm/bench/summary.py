"""The figures of a run, computed from its records."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graftlm.bench.lag import LagMonitor
from graftlm.bench.records import RequestRecord
from graftlm.bench.settings import BenchSettings, LoadMode

__all__ = ["Distribution", "FailureCount", "Summary", "summarize"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of a quantity.

    Attributes:
        count: number of values.
        percentiles: percentile, such as "50" -> value, with linear interpolation.
    """

    count: int
    mean: float
    stddev: float
    min: float
    max: float
    percentiles: dict[str, float]


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The failures of one kind.

    Attributes:
        kind: see `Failure`.
        count: number of these failures.
        example: message of the first failure.
    """

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run; docs/benchmarking.md describes them. Latencies include completed requests only."""

    mode: LoadMode
    duration_s: float
    requests: int
    completed: int
    failed: int
    failures: list[FailureCount]
    finish_reasons: dict[str, int]
    asked_rate: float | None
    sent_rate: float | None
    completed_rate: float
    mean_in_flight: float
    max_in_flight: int
    requests_without_usage: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    tokens_per_chunk: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    gap_s: Distribution | None
    e2e_s: Distribution | None
    e2e_from_arrival_s: Distribution | None
    client_queue_s: Distribution | None
    loop_lag_s: Distribution | None
    client_cpu_share: float


def summarize(records: Sequence[RequestRecord], settings: BenchSettings, lag: LagMonitor) -> Summary:
    """Compute the figures of a run.

    Args:
        records: the records of all requests, at least one.
        settings: the settings of the run.
        lag: the measured lag of the client's event loop.
    """
    completed = [record for record in records if record.failure is None]
    counted = [r for r in completed if r.prompt_tokens is not None and r.output_tokens is not None]
    duration_s = max(r.end_s for r in records) - min(r.sent_s for r in records)
    prompt_tokens = sum(r.prompt_tokens or 0 for r in counted)
    output_tokens = sum(r.output_tokens or 0 for r in counted)
    cached = [r.cached_tokens for r in counted if r.cached_tokens is not None]
    mean_in_flight, max_in_flight = _in_flight(records, duration_s)

    def spread(values: Iterable[float | None]) -> Distribution | None:
        return _distribution([v for v in values if v is not None], settings.percentiles)

    return Summary(
        mode=settings.mode,
        duration_s=duration_s,
        requests=len(records),
        completed=len(completed),
        failed=len(records) - len(completed),
        failures=_failures(records),
        finish_reasons=dict(Counter(r.finish_reason or "unknown" for r in completed).most_common()),
        asked_rate=settings.request_rate,
        sent_rate=None if settings.request_rate is None else _rate([r.sent_s for r in records]),
        completed_rate=_per(len(completed), duration_s),
        mean_in_flight=mean_in_flight,
        max_in_flight=max_in_flight,
        requests_without_usage=len(completed) - len(counted),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        prompt_tokens_per_s=_per(prompt_tokens, duration_s),
        output_tokens_per_s=_per(output_tokens, duration_s),
        total_tokens_per_s=_per(prompt_tokens + output_tokens, duration_s),
        tokens_per_chunk=_tokens_per_chunk(completed),
        ttft_s=spread(r.ttft_s for r in completed),
        tpot_s=spread(r.tpot_s for r in completed),
        gap_s=spread(gap for r in completed for gap in r.gaps_s or ()),
        e2e_s=spread(r.e2e_s for r in completed),
        e2e_from_arrival_s=spread(r.end_s - r.scheduled_s for r in completed if r.scheduled_s is not None),
        client_queue_s=spread(r.client_queue_s for r in records),
        loop_lag_s=_distribution(lag.lags_s, settings.percentiles),
        client_cpu_share=lag.cpu_share,
    )


def _distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution | None:
    if not len(values):
        return None
    array: NDArray[np.float64] = np.asarray(values, np.float64)
    at = np.percentile(array, percentiles)
    return Distribution(
        count=len(array),
        mean=float(array.mean()),
        stddev=float(array.std()),
        min=float(array.min()),
        max=float(array.max()),
        percentiles={f"{p:g}": float(value) for p, value in zip(percentiles, at, strict=True)},
    )


def _failures(records: Iterable[RequestRecord]) -> list[FailureCount]:
    """Count failures by kind, the most frequent first."""
    failures = [record.failure for record in records if record.failure is not None]
    counts = Counter(failure.kind for failure in failures).most_common()
    return [FailureCount(kind, n, next(f.message for f in failures if f.kind == kind)) for kind, n in counts]


def _rate(moments_s: Sequence[float]) -> float | None:
    """Return the mean number of events per second, for the events' times; None for fewer than two different times."""
    span_s = max(moments_s) - min(moments_s)
    return (len(moments_s) - 1) / span_s if span_s > 0 else None


def _per(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _in_flight(records: Sequence[RequestRecord], duration_s: float) -> tuple[float, int]:
    """Return the mean and the largest number of requests that ran at the same time."""
    busy_s = sum(record.end_s - record.sent_s for record in records)
    # At equal times, the end of a request is counted before the start of another one.
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    in_flight = np.cumsum([change for _, change in changes])
    return _per(busy_s, duration_s), int(in_flight.max())


def _tokens_per_chunk(records: Iterable[RequestRecord]) -> float | None:
    """Return the mean number of tokens in a chunk; None if there are no counts or no chunks."""
    known = [(r.output_tokens, r.num_chunks) for r in records if r.output_tokens is not None and r.num_chunks]
    num_chunks = sum(chunks for _, chunks in known)
    return sum(tokens for tokens, _ in known) / num_chunks if num_chunks else None
