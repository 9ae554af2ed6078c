"""The figures of a replay that reports show."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from graftlm.route_sim.study import FleetStudy, RouteOutcome, TraceRouteStudy

__all__ = ["RouteFigures", "study_as_json"]


@dataclass(frozen=True, slots=True)
class RouteFigures:
    """The figures of one policy with one number of replicas.

    Attributes:
        hit_rate: share of the prompt tokens that were found in the caches.
        share_of_one_cache: the hit rate, divided by that of one cache with the memory of all replicas; None if that
            cache has no hits.
        busiest_tokens, busiest_requests, busiest_time: the largest number of computed tokens, requests and seconds of
            steps of a replica, divided by the mean of all replicas.
        ttft_mean_s, ttft_p50_s, ttft_p99_s: time to first token in simulated seconds.
        decision_mean_us, decision_p50_us, decision_p99_us: time of a decision in µs, with the digests of the prompt.
    """

    hit_rate: float
    share_of_one_cache: float | None
    busiest_tokens: float
    busiest_requests: float
    busiest_time: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    decision_mean_us: float
    decision_p50_us: float
    decision_p99_us: float

    @classmethod
    def of(cls, outcome: RouteOutcome, fleet: FleetStudy) -> "RouteFigures":
        """Compute the figures of an outcome."""
        run, best = outcome.run, fleet.one_cache_hit_tokens
        ttft_s, decision_us = np.array(run.ttft_s), np.array(run.decision_ns) / 1000
        return cls(
            run.hit_tokens / run.prompt_tokens,
            run.hit_tokens / best if best else None,
            run.busiest_over_mean(lambda replica: replica.computed_tokens),
            run.busiest_over_mean(lambda replica: replica.num_requests),
            run.busiest_over_mean(lambda replica: replica.busy_s),
            float(ttft_s.mean()),
            float(np.percentile(ttft_s, 50)),
            float(np.percentile(ttft_s, 99)),
            float(decision_us.mean()),
            float(np.percentile(decision_us, 50)),
            float(np.percentile(decision_us, 99)),
        )


def study_as_json(study: TraceRouteStudy) -> dict[str, Any]:
    """Return all figures of a study as JSON values."""
    trace = study.trace
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
        "duration_s": trace.requests[-1].time_s - trace.requests[0].time_s,
        "page_size": study.page_size,
        "capacity_tokens": study.capacity_pages * study.page_size,
        "fleets": [
            {
                "replicas": fleet.num_replicas,
                "one_cache_hit_rate": fleet.one_cache_hit_tokens / trace.prompt_tokens,
                "policies": [
                    {
                        "policy": {"name": outcome.policy.name, "options": dict(outcome.policy.options)},
                        **asdict(RouteFigures.of(outcome, fleet)),
                    }
                    for outcome in fleet.outcomes
                ],
            }
            for fleet in study.fleets
        ],
    }
