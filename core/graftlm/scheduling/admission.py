"""How much memory to keep for the running requests when a new one asks to come in."""

from collections.abc import Sequence

import numpy as np

from graftlm.memory import RequestTable

__all__ = ["AdmissionControl"]


class AdmissionControl:
    """Estimates the pages that running requests will still need.

    A request may generate up to its limit but rarely does. The estimate is a share of what they may at most need: it
    sinks slowly while all goes well and rises when a request had to be retracted.
    """

    FIRST_SHARE = 0.5
    MIN_SHARE = 0.05
    DECAY = 0.995  # per step
    RAISE = 0.1  # per retraction
    #: A request's own need counts up to this many tokens: far futures are settled by then.
    HORIZON_TOKENS = 4096

    def __init__(self, table: RequestTable, page_size: int) -> None:
        self._table = table
        self._page_size = page_size
        self.share = self.FIRST_SHARE

    def step_planned(self) -> None:
        """Let the estimate sink."""
        self.share = max(self.MIN_SHARE, self.share * self.DECAY)

    def retracted(self) -> None:
        """Let the estimate rise."""
        self.share = min(1.0, self.share + self.RAISE)

    def reserved_pages(self, leaving: Sequence[int] = ()) -> int:
        """Return the pages to keep for the rows that run now: what their prompts lack, and a share of their outputs.

        Args:
            leaving: rows that do not count.
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
