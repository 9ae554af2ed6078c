"""Orders at random, as the baseline that a useful policy must exceed."""

import random
from collections.abc import Sequence

from graftlm.contracts import SchedulingPolicy, WaitingRequest
from graftlm_scheduling.options import RandomOrderOptions

__all__ = ["RandomOrder"]


class RandomOrder(SchedulingPolicy):
    """Draws a new order at each call. The order depends only on the number of requests, the seed and the time."""

    def __init__(self, options: RandomOrderOptions, seed: int) -> None:
        self.max_wait_s = options.max_wait_s
        self._seed = seed if options.seed is None else options.seed

    def order(self, waiting: Sequence[WaitingRequest], now: float) -> list[WaitingRequest]:
        """Return the requests in an order that depends on their number, the seed and `now`."""
        draw = random.Random(f"{self._seed} {now!r}")
        return draw.sample(waiting, len(waiting))
