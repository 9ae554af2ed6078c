"""Warnings about a run whose figures may be misleading."""

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
    """Return the warnings about a run as sentences; none if there is no problem."""
    return [
        *_client_warnings(summary),
        *_load_warnings(settings, summary),
        *_answer_warnings(settings, workload, summary),
    ]


def _client_warnings(summary: Summary) -> Iterator[str]:
    lag = summary.loop_lag_s
    if lag is not None and _worst(lag.percentiles) > _LAG_S:
        yield (
            f"this client was too slow: its event loop ran up to {1e3 * lag.max:.0f} ms late (mean "
            f"{1e3 * lag.mean:.1f} ms), which is included in every latency; run it on an idle machine, or split the "
            "load over several clients"
        )
    elif summary.client_cpu_share > _CPU_SHARE:
        yield (
            f"this client used {summary.client_cpu_share:.0%} of a core, so the latencies may include its own delays; "
            "split the load over several clients"
        )


def _worst(percentiles: dict[str, float]) -> float:
    """Return the value of the highest reported percentile."""
    return percentiles[max(percentiles, key=float)]


def _load_warnings(settings: BenchSettings, summary: Summary) -> Iterator[str]:
    asked, sent = summary.asked_rate, summary.sent_rate
    if asked is not None and sent is not None and sent < _RATE_SHARE * asked:
        why = "--concurrency delayed requests" if settings.concurrency else "this client was too slow"
        yield f"requests were sent at {sent:.2f}/s instead of the requested {asked:.2f}/s: {why}"


def _answer_warnings(settings: BenchSettings, workload: Workload, summary: Summary) -> Iterator[str]:
    if summary.failed:
        yield (
            f"{summary.failed} of {summary.requests} requests failed; the latencies are those of the successful "
            "requests"
        )
    if summary.requests_without_usage:
        yield (
            f"{summary.requests_without_usage} answers had no token counts; tokens, tokens per second and time per "
            "token do not include these answers"
        )
    if settings.ignore_eos and summary.finish_reasons.get("stop"):
        yield (
            f"{summary.finish_reasons['stop']} answers stopped early despite --ignore-eos: the server ignores the "
            "option, so the outputs of runs differ in length"
        )
    if workload.num_repeated:
        yield (
            f"{workload.num_repeated} requests repeat lines of the dataset, so the prefix cache contains their prompts"
        )
    cached_share = (summary.cached_tokens or 0) / max(1, summary.prompt_tokens)
    if workload.shared_share is not None and cached_share > workload.shared_share + _CACHED_SURPLUS:
        yield (
            f"{cached_share:.0%} of the prompt tokens were cached, but shared prefixes explain only "
            f"{workload.shared_share:.0%}: an earlier run has sent these prompts; use --flush-cache or another --seed"
        )
