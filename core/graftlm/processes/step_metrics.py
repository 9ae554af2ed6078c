"""Measurements of the steps, which are sent to the main process."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from graftlm.records import StepRecord

__all__ = ["STEP_BUCKETS_S", "STEP_HISTOGRAMS", "Histogram", "StepMetrics"]

#: Upper bounds of the buckets in seconds. A step of a tiny model takes about 1 ms. A long prompt with a large model
#: takes seconds.
STEP_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip

#: Name -> help text.
STEP_HISTOGRAMS: Final = {
    "step_host_seconds": "Seconds that planning and commit of a step took.",
    "step_model_seconds": "Seconds that the device took for a step.",
}


class Histogram:
    """Counts observed values by bucket. The last bucket has no upper bound.

    Args:
        bounds: the upper bounds of all buckets except the last, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose upper bound is at least the value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> tuple[list[int], float]:
        """Return the counts by bucket (not cumulated) and the sum of all values."""
        return list(self._counts), self._sum


class StepMetrics:
    """Observes the steps of one scheduler process.

    Attributes:
        prefill_tokens: number of prompt tokens that the steps have computed.
    """

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self._host = Histogram(STEP_BUCKETS_S)
        self._model = Histogram(STEP_BUCKETS_S)

    def observe(self, record: StepRecord) -> None:
        """Add a step to the histograms and to the count of tokens."""
        self.prefill_tokens += record.num_prefill_tokens
        self._host.observe(record.host_s)
        self._model.observe(record.model_s)

    def snapshot(self) -> dict[str, tuple[list[int], float]]:
        """Return the histograms by name, in the form of `messages.Load.histograms`."""
        return {"step_host_seconds": self._host.snapshot(), "step_model_seconds": self._model.snapshot()}
