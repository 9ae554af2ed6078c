"""The load of all replicas together over the last five minutes, with one point per second."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from graftlm.processes.replicas import Replica
from graftlm.server.dashboard.latencies import RecentLatencies
from graftlm.server.token_sums import TokenCounters, TokenSums

__all__ = ["History", "Point"]

INTERVAL_S: Final = 1.0
_NUM_POINTS: Final = 300
#: Number of points over which a rate is computed. A report is up to 0.2 s old, which would distort a rate over 1 s.
_RATE_WINDOW: Final = 2
#: Number of points over which shares and means are computed. A shorter time contains too few prompts.
_LONG_WINDOW: Final = 30
#: Number of points over which percentiles of latencies are computed.
_LATENCY_WINDOW: Final = 10


class Point(NamedTuple):
    """The load of all replicas at one moment, and their rates over the last 2 s.

    Attributes:
        time_s: reading of the history's clock, in seconds.
        hit_rate: share of the prompt tokens of the last 30 s that were found in the prefix cache, from 0 to 1; None if
            there were no prompts.
        tokens_per_step: mean number of tokens that a request's decode step yielded in the last 30 s, above 1 with
            speculation or jump-forward; None if nothing was generated.
        first_token_p50_s, first_token_p95_s: median and 95th percentile of the times to the first token in the last
            10 s, in seconds; None if there was no first token.
        inter_token_p50_s, inter_token_p95_s: the same of the times between two tokens of a request.
        accept_len, accept_rate: the values of `TokenSums` for the last 30 s; None if nothing was drafted.
    """

    time_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    generated_tokens_per_s: float
    hit_rate: float | None
    tokens_per_step: float | None
    accept_len: float | None
    accept_rate: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    running_requests: int
    queued_requests: int
    free_pages: int
    evictable_pages: int
    locked_pages: int
    owned_pages: int


class History:
    """Stores the points of the last five minutes.

    Args:
        clock: a monotonic clock, in seconds.

    Attributes:
        latencies: measures the requests; the caller connects it to them.
    """

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        self.latencies = RecentLatencies(_LATENCY_WINDOW)
        self._replicas = replicas
        self._counters = TokenCounters(replicas, clock)
        self._sums: deque[TokenSums] = deque([self._counters.read()], maxlen=_LONG_WINDOW + 1)
        self._points: deque[Point] = deque(maxlen=_NUM_POINTS)

    async def run(self) -> None:
        """Append a point every second, until the task is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Append a point that is computed from the replicas' latest reports."""
        sums = self._counters.read()
        recent = sums.since(self._sums[max(-_RATE_WINDOW, -len(self._sums))])
        longer = sums.since(self._sums[0])
        self._sums.append(sums)
        self.latencies.end_interval()
        first_tokens = self.latencies.first_tokens.percentiles(0.5, 0.95)
        gaps = self.latencies.gaps.percentiles(0.5, 0.95)
        seconds = max(recent.time_s, 1e-3)
        reports = [replica.load.stats for replica in self._replicas if replica.load is not None]
        point = Point(
            time_s=sums.time_s,
            prompt_tokens_per_s=recent.prompt_tokens / seconds,
            cached_tokens_per_s=recent.cached_tokens / seconds,
            generated_tokens_per_s=recent.generated_tokens / seconds,
            hit_rate=longer.hit_rate,
            tokens_per_step=_tokens_per_step(longer),
            accept_len=longer.accept_len,
            accept_rate=longer.accept_rate,
            first_token_p50_s=first_tokens[0],
            first_token_p95_s=first_tokens[1],
            inter_token_p50_s=gaps[0],
            inter_token_p95_s=gaps[1],
            running_requests=sum(stats.running_requests for stats in reports),
            queued_requests=sum(stats.waiting_requests for stats in reports),
            free_pages=sum(stats.free_pages for stats in reports),
            evictable_pages=sum(stats.evictable_pages for stats in reports),
            locked_pages=sum(stats.locked_pages for stats in reports),
            owned_pages=sum(stats.owned_pages for stats in reports),
        )
        self._points.append(point)

    @property
    def latest(self) -> Point | None:
        """The newest point; None before the first one."""
        return self._points[-1] if self._points else None

    def after(self, time_s: float) -> list[Point]:
        """Return the points that are newer than `time_s`, oldest first. `time_s` is in seconds of the clock."""
        return [point for point in self._points if point.time_s > time_s]


def _tokens_per_step(growth: TokenSums) -> float | None:
    return growth.generated_tokens / growth.sampled_tokens if growth.sampled_tokens > 0 else None
