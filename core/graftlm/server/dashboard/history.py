"""The load of all replicas together over the last five minutes, with one point per second."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from graftlm.processes.replicas import Replica
from graftlm.records import EngineStats

__all__ = ["History", "Point"]

INTERVAL_S: Final = 1.0
_NUM_POINTS: Final = 300
#: Number of points over which a rate is computed. A report is up to 0.2 s old, which would distort a rate over 1 s.
_RATE_WINDOW: Final = 2
#: Number of points over which the hit rate is computed. Fewer points would contain too few prompts.
_HIT_WINDOW: Final = 30


class Point(NamedTuple):
    """The load of all replicas at one moment, and their rates over the last 2 s.

    Attributes:
        time_s: reading of the history's clock, in seconds.
        hit_rate: share of the prompt tokens of the last 30 s that were found in the prefix cache, from 0 to 1; None if
            there were no prompts.
        tokens_per_step: mean number of tokens per request and decode step in the last 30 s. It exceeds 1 with
            speculation or jump-forward. None if no token was generated.
    """

    time_s: float
    prompt_tokens_per_s: float
    cached_tokens_per_s: float
    generated_tokens_per_s: float
    hit_rate: float | None
    tokens_per_step: float | None
    running_requests: int
    queued_requests: int
    free_pages: int
    evictable_pages: int
    locked_pages: int
    owned_pages: int


class _Sums(NamedTuple):
    """Sums of the token counters of all replicas, including those that have died."""

    time_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    unsampled_tokens: int  # generated tokens that needed no additional step: accepted drafts and jump-forward


class History:
    """Stores the points of the last five minutes.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, replicas: Sequence[Replica], clock: Callable[[], float]) -> None:
        self._replicas = replicas
        self._clock = clock
        self._counted: dict[str, EngineStats] = {}
        self._sums: deque[_Sums] = deque(maxlen=_HIT_WINDOW + 1)
        self._points: deque[Point] = deque(maxlen=_NUM_POINTS)
        self._sums.append(self._add_up(_Sums(clock(), 0, 0, 0, 0)))

    async def run(self) -> None:
        """Append a point every second, until the task is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Append a point that is computed from the replicas' latest reports."""
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
            tokens_per_step=_tokens_per_step(sums, oldest),
            running_requests=sum(stats.running_requests for stats in reports),
            queued_requests=sum(stats.waiting_requests for stats in reports),
            free_pages=sum(stats.free_pages for stats in reports),
            evictable_pages=sum(stats.evictable_pages for stats in reports),
            locked_pages=sum(stats.locked_pages for stats in reports),
            owned_pages=sum(stats.owned_pages for stats in reports),
        )
        self._points.append(point)

    def after(self, time_s: float) -> list[Point]:
        """Return the points that are newer than `time_s`, oldest first. `time_s` is in seconds of the clock."""
        return [point for point in self._points if point.time_s > time_s]

    def _add_up(self, last: _Sums) -> _Sums:
        """Return `last` plus the increase of the replicas' counters since `last`. Restarted replicas count from 0."""
        prompt_tokens, cached_tokens, generated_tokens, unsampled_tokens = last[1:]
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
            unsampled_tokens += _unsampled(stats) - (_unsampled(before) if before else 0)
            self._counted[replica.name] = stats
        return _Sums(self._clock(), prompt_tokens, cached_tokens, generated_tokens, unsampled_tokens)


def _unsampled(stats: EngineStats) -> int:
    return stats.jump_forward_tokens + sum(accepted for _, accepted in stats.drafts.values())


def _tokens_per_step(sums: _Sums, oldest: _Sums) -> float | None:
    generated_tokens = sums.generated_tokens - oldest.generated_tokens
    num_steps = generated_tokens - (sums.unsampled_tokens - oldest.unsampled_tokens)
    return generated_tokens / num_steps if num_steps > 0 else None


def _hit_rate(sums: _Sums, oldest: _Sums) -> float | None:
    prompt_tokens = sums.prompt_tokens - oldest.prompt_tokens
    if not prompt_tokens:
        return None
    # A prompt's tokens are counted when it is queued, but its cached tokens only when it is admitted. Therefore the
    # quotient can exceed 1.
    return min(1.0, (sums.cached_tokens - oldest.cached_tokens) / prompt_tokens)
