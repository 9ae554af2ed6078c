"""The latencies of the last seconds, as percentiles."""

import math
from collections import Counter, deque
from typing import Final

from graftlm.outputs import GatheredOutput

__all__ = ["LatencyWindow", "RecentLatencies"]

#: Ratio of a bucket's upper bound to its lower bound. A percentile differs from the exact one by at most 2.5%.
_RATIO: Final = 1.05
_LOG_RATIO: Final = math.log(_RATIO)
#: The lower bound of the first bucket in seconds; shorter times count as this time.
_SHORTEST_S: Final = 1e-6


class LatencyWindow:
    """Counts times by bucket over the last intervals. The buckets' bounds grow by 5%.

    Args:
        num_intervals: number of intervals that percentiles cover.
    """

    def __init__(self, num_intervals: int) -> None:
        self._current: Counter[int] = Counter()
        self._intervals: deque[Counter[int]] = deque(maxlen=num_intervals)

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a time `count` times."""
        self._current[math.floor(math.log(max(seconds, _SHORTEST_S)) / _LOG_RATIO)] += count

    def end_interval(self) -> None:
        """Start a new interval."""
        self._intervals.append(self._current)
        self._current = Counter()

    def percentiles(self, *shares: float) -> tuple[float | None, ...]:
        """Return for each share, ascending from 0 to 1, the time that this share of the times does not exceed.

        The current interval does not count. Returns: None for each share if no time was counted.
        """
        counts = sum(self._intervals, Counter[int]())
        total = counts.total()
        if not total:
            return (None,) * len(shares)
        found: list[float] = []
        so_far = 0
        for bucket in sorted(counts):
            so_far += counts[bucket]
            while len(found) < len(shares) and so_far >= shares[len(found)] * total:
                found.append(_RATIO ** (bucket + 0.5))
        return tuple(found)


class RecentLatencies:
    """Measures the time to the first token and the time between tokens, for the charts.

    Attributes:
        first_tokens: times from a request's arrival to its first token.
        gaps: times between a request's tokens.
    """

    def __init__(self, num_intervals: int) -> None:
        self.first_tokens = LatencyWindow(num_intervals)
        self.gaps = LatencyWindow(num_intervals)

    def end_interval(self) -> None:
        """Start a new interval in both windows."""
        self.first_tokens.end_interval()
        self.gaps.end_interval()

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival in the server to its first token."""
        self.first_tokens.observe(seconds)

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record later tokens of a request. Tokens that arrived together divide the time equally."""
        self.gaps.observe(seconds / num_tokens, num_tokens)

    def finished(self, output: GatheredOutput, seconds: float, outcome: str) -> None:
        """Do nothing: the end of a request is in no chart."""
