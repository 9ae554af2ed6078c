"""What a reader must know before believing a run's figures."""

from collections.abc import Iterator
from typing import Final

from graftlm.bench.settings import BenchSettings
from graftlm.bench.summary import Summary
from graftlm.bench.workload import Workload

__all__ = ["caveats"]

_LAG_S: Final = 0.01
_CPU_SHARE: Final = 0.9
_RATE_SHARE: Final = 0.95
_CACHED_SURPLUS: Final = 0.05


def caveats(settings: BenchSettings, workload: Workload, summary: Summary) -> list[str]:
    """Return what may mislead, in sentences; nothing when all is well."""
    return [*_of_the_client(summary), *_of_the_load(settings, summary), *_of_the_answers(settings, workload, summary)]


def _of_the_client(summary: Summary) -> Iterator[str]:
    lag = summary.loop_lag_s
    if lag is not None and _worst(lag.percentiles) > _LAG_S:
        yield (
            f"this client could not keep up: its event loop ran up to {1e3 * lag.max:.0f} ms late (mean "
            f"{1e3 * lag.mean:.1f} ms), which is in every latency; run it on an idle machine, or split the load over "
            "several clients"
        )
    elif summary.client_cpu_share > _CPU_SHARE:
        yield (
            f"this client used {summary.client_cpu_share:.0%} of a core; beyond that its latencies are its own: split "
            "the load over several clients"
        )


def _worst(percentiles: dict[str, float]) -> float:
    """Return the value of the highest percentile asked for."""
    return percentiles[max(percentiles, key=float)]


def _of_the_load(settings: BenchSettings, summary: Summary) -> Iterator[str]:
    asked, sent = summary.asked_rate, summary.sent_rate
    if asked is not None and sent is not None and sent < _RATE_SHARE * asked:
        why = "--concurrency held requests back" if settings.concurrency else "this client was too slow"
        yield f"requests were sent at {sent:.2f}/s, not at the {asked:.2f}/s asked for: {why}"


def _of_the_answers(settings: BenchSettings, workload: Workload, summary: Summary) -> Iterator[str]:
    if summary.failed:
        yield f"{summary.failed} of {summary.requests} requests failed; latencies are of the others only"
    if summary.requests_without_usage:
        yield (
            f"{summary.requests_without_usage} answers came without token counts; tokens, tokens per second and time "
            "per token leave them out"
        )
    if settings.ignore_eos and summary.finish_reasons.get("stop"):
        yield (
            f"{summary.finish_reasons['stop']} answers stopped early in spite of --ignore-eos: the server does not "
            "follow it, and runs differ in length"
        )
    if workload.num_repeated:
        yield f"{workload.num_repeated} requests repeat lines of the dataset, which a prefix cache knows"
    cached_share = (summary.cached_tokens or 0) / max(1, summary.prompt_tokens)
    if workload.shared_share is not None and cached_share > workload.shared_share + _CACHED_SURPLUS:
        yield (
            f"{cached_share:.0%} of the prompt tokens were cached, where shared prefixes explain "
            f"{workload.shared_share:.0%}: an earlier run has sent these prompts; give --flush-cache or another --seed"
        )
