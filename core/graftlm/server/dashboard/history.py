"""The last minutes of all replicas together, a point a second."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from graftlm.processes.replicas import Replica
from graftlm.records import EngineStats

__all__ = ["History", "Point"]

INTERVAL_S: Final = 1.0
_NUM_POINTS: Final = 300
#: Points that a rate spans. A report is up to a fifth of a second old: over one point, that would show.
_RATE_WINDOW: Final = 2
#: A few prompts say little about how many tokens are found.
_HIT_WINDOW: Final = 30


class Point(NamedTuple):
    """The replicas at one moment, and their rates just before it.

    Attributes:
        time_s: of the history's clock.
        hit_rate: share of the prompt tokens of the last half minute that were found; None without prompts.
    """

    time_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    generated_tokens_per_s: float
    hit_rate: float | None
    running_requests: int
    queued_requests: int
    free_pages: int
    evictable_pages: int
    locked_pages: int
    owned_pages: int


class _Sums(NamedTuple):
    """What all replicas have counted, those that have died included."""

    time_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class History:
    """Keeps points, five minutes of them at most."""

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._clock = clock
        self._counted: dict[str, EngineStats] = {}
        self._sums: deque[_Sums] = deque(maxlen=_HIT_WINDOW + 1)
        self._points: deque[Point] = deque(maxlen=_NUM_POINTS)
        self._sums.append(self._add_up(_Sums(clock(), 0, 0, 0)))

    async def run(self) -> None:
        """Take a point each second, for ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Take a point from the replicas' latest reports."""
        sums = self._add_up(self._sums[-1])
        before, oldest = self._sums[max(-_RATE_WINDOW, -len(self._sums))], self._sums[0]
        self._sums.append(sums)
        seconds = max(sums.time_s - before.time_s, 1e-3)
        reports = [replica.load.stats for replica in self._replicas if replica.load is not None]
        point = Point(
            time_s=sums.time_s,
            prompt_tokens_per_s=(sums.prompt_tokens - before.prompt_tokens) / seconds,
            cached_tokens_per_s=(sums.cached_tokens - before.cached_tokens) / seconds,
            generated_tokens_per_s=(sums.generated_tokens - before.generated_tokens) / seconds,
            hit_rate=_hit_rate(sums, oldest),
            running_requests=sum(stats.running_requests for stats in reports),
            queued_requests=sum(stats.waiting_requests for stats in reports),
            free_pages=sum(stats.free_pages for stats in reports),
            evictable_pages=sum(stats.evictable_pages for stats in reports),
            locked_pages=sum(stats.locked_pages for stats in reports),
            owned_pages=sum(stats.owned_pages for stats in reports),
        )
        self._points.append(point)

    def after(self, time_s: float) -> list[Point]:
        """Return the points taken later than a reading of the clock, oldest first."""
        return [point for point in self._points if point.time_s > time_s]

    def _add_up(self, last: _Sums) -> _Sums:
        """Return the sums with what the replicas have counted since. One that was started again counts from 0."""
        prompt_tokens, cached_tokens, generated_tokens = last[1:]
        for replica in self._replicas:
            if replica.load is None:
                self._counted.pop(replica.name, None)
                continue
            stats, before = replica.load.stats, self._counted.get(replica.name)
            if before is not None and stats.steps < before.steps:
                before = None
            prompt_tokens += stats.prompt_tokens - (before.prompt_tokens if before else 0)
            cached_tokens += stats.cached_tokens - (before.cached_tokens if before else 0)
            generated_tokens += stats.generated_tokens - (before.generated_tokens if before else 0)
            self._counted[replica.name] = stats
        return _Sums(self._clock(), prompt_tokens, cached_tokens, generated_tokens)


def _hit_rate(sums: _Sums, oldest: _Sums) -> float | None:
    prompt_tokens = sums.prompt_tokens - oldest.prompt_tokens
    if not prompt_tokens:
        return None
    # Prompts count when they are queued, what is found of them when they are admitted: that can be later.
    return min(1.0, (sums.cached_tokens - oldest.cached_tokens) / prompt_tokens)
