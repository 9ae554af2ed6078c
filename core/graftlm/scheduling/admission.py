"""Estimates the memory to reserve for running requests when a new request is admitted."""

from collections.abc import Sequence

import numpy as np

from graftlm.memory import RequestTable

__all__ = ["AdmissionControl"]


class AdmissionControl:
    """Estimates the number of pages that running requests will still need.

    A request rarely generates as many tokens as its limit allows. The estimate therefore covers the rest of the running
    requests' prompts, and only a share of their maximum outputs. The share decreases slowly with each step, and
    increases when a request is retracted. `Planner` admits a request only if the remaining pages suffice for it.
    """

    FIRST_SHARE = 0.5
    MIN_SHARE = 0.05
    DECAY = 0.995  # factor of the share per step
    RAISE = 0.1  # added to the share per retraction
    #: Maximum number of future output tokens that are counted per request.
    HORIZON_TOKENS = 4096

    def __init__(self, table: RequestTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self.share = self.FIRST_SHARE

    def step_planned(self) -> None:
        """Decrease the share, because a step was planned."""
        self.share = max(self.MIN_SHARE, self.share * self.DECAY)

    def retracted(self) -> None:
        """Increase the share, because a request was retracted."""
        self.share = min(1.0, self.share + self.RAISE)

    def reserved_pages(self, leaving: Sequence[int] = ()) -> int:
        """Return the number of pages to reserve for the rest of running rows' prompts and a share of their outputs.

        Args:
            leaving: rows that will be retracted, and are therefore not counted.
        """
        table = self._table
        taken = table.limit > 0
        taken[list(leaving)] = False
        held = table.num_pages[taken].astype(np.int64) * self._page_size
        known = table.known[taken]
        prompt_rest = np.maximum(known - held, 0)
        output_rest = np.minimum(table.limit[taken] - known, self.HORIZON_TOKENS)
        tokens = float(prompt_rest.sum()) + self.share * float(output_rest.sum())
        return -int(-tokens // self._page_size)
