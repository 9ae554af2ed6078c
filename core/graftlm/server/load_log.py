"""A log line with the server's load, written periodically while there are requests."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from graftlm.processes.replicas import Replica
from graftlm.server.token_sums import TokenCounters, TokenSums

__all__ = ["LoadLog"]

logger = logging.getLogger(__name__)


class LoadLog:
    """Logs the load of all replicas together. It reads their latest reports, so the schedulers do no work for it.

    Args:
        clock: a monotonic clock, in seconds.
        interval_s: seconds between two lines.
    """

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float], interval_s: float) -> None:
        self._replicas = replicas
        self._interval_s = interval_s
        self._counters = TokenCounters(replicas, clock)
        self._last = self._counters.read()

    async def run(self) -> None:
        """Call `write` after each interval, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.write()

    def write(self) -> None:
        """Log the load since the last call, unless the server was idle since then."""
        sums = self._counters.read()
        growth, self._last = sums.since(self._last), sums
        reports = [replica.load.stats for replica in self._replicas if replica.load is not None]
        running = sum(stats.running_requests for stats in reports)
        queued = sum(stats.waiting_requests for stats in reports)
        if not (running or queued or any(growth[1:])):
            return
        used_pages = sum(stats.locked_pages + stats.owned_pages for stats in reports)
        total_pages = sum(stats.total_pages for stats in reports)
        values = _values(growth) | {
            "running_requests": running,
            "queued_requests": queued,
            "kv_usage": round(used_pages / max(1, total_pages), 4),
        }
        logger.info("%s", _line(values), extra=values)


def _values(growth: TokenSums) -> dict[str, float | None]:
    """Return the rates and shares, by the names that they have in JSON."""
    seconds = max(growth.time_s, 1e-3)
    return {
        "prefill_tokens_per_s": round(growth.prefill_tokens / seconds, 1),
        "decode_tokens_per_s": round(growth.generated_tokens / seconds, 1),
        "hit_rate": _rounded(growth.hit_rate),
        "accept_len": _rounded(growth.accept_len),
        "accept_rate": _rounded(growth.accept_rate),
    }


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _line(values: dict[str, float | None]) -> str:
    parts = [
        f"{values['running_requests']} running and {values['queued_requests']} queued requests",
        f"prefill {values['prefill_tokens_per_s']:,.1f} tokens/s",
        f"decode {values['decode_tokens_per_s']:,.1f} tokens/s",
        f"hit rate {_percent(values['hit_rate'])}",
        f"KV memory {_percent(values['kv_usage'])}",
    ]
    if values["accept_len"] is not None:
        parts.append(f"{values['accept_len']:.2f} tokens/step, {_percent(values['accept_rate'])} of drafts accepted")
    return ", ".join(parts)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
