"""The rows of running requests: page tables and lengths, one numpy array per column."""

import numpy as np

from graftlm.types import PageIds

__all__ = ["RequestTable"]


class RequestTable:
    """The state of running requests, one array per column and indexed by row, so plans need no Python loop over tokens.

        tokens   0 ............ computed[r] ...... known[r] ..... limit[r]
                 | KV is written | to be computed | may still be generated
        pages    | cached_pages[r]: the cache's, locked | own pages | up to num_pages[r]

    Attributes:
        page_table: int32 [R, P]; columns past num_pages are stale.
        num_pages: int32 [R], number of valid entries of each page table row.
        cached_pages: int32 [R], number of leading pages that belong to the prefix cache.
        computed: int64 [R], number of tokens whose keys and values are written by the steps planned so far.
        known: int64 [R], number of tokens, including those that a planned step will sample.
        limit: int64 [R], upper limit of `known`.
        on_device: bool [R], whether the token at known - 1 was sampled in this row; its value is then on the device.
        constrained: bool [R], whether the request has a grammar.
        adapter_slot: int32 [R], the slot of the request's adapter; 0 without adapter.
        num_adapted: number of rows with an adapter.
        rope_offset: int64 [R], number added to a generated token's position for the rotary embedding.
        num_shifted: number of rows whose `rope_offset` is not 0.
    """

    def __init__(self, num_rows: int, max_pages_per_row: int) -> None:
        self.num_rows = num_rows
        self.page_table = np.zeros((num_rows, max_pages_per_row), dtype=np.int32)
        self.num_pages = np.zeros(num_rows, dtype=np.int32)
        self.cached_pages = np.zeros(num_rows, dtype=np.int32)
        self.computed = np.zeros(num_rows, dtype=np.int64)
        self.known = np.zeros(num_rows, dtype=np.int64)
        self.limit = np.zeros(num_rows, dtype=np.int64)
        self.on_device = np.zeros(num_rows, dtype=np.bool_)
        self.constrained = np.zeros(num_rows, dtype=np.bool_)
        self.adapter_slot = np.zeros(num_rows, dtype=np.int32)
        self.num_adapted = 0
        self.rope_offset = np.zeros(num_rows, dtype=np.int64)
        self.num_shifted = 0
        self._columns = (
            self.num_pages,
            self.cached_pages,
            self.computed,
            self.known,
            self.limit,
            self.on_device,
            self.constrained,
            self.adapter_slot,
            self.rope_offset,
        )
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free_rows(self) -> int:
        """Number of rows without a request."""
        return len(self._free_rows)

    def take_row(self, known: int, limit: int, adapter_slot: int = 0) -> int:
        """Allocate a row for a request with `known` tokens to compute. A row must be free."""
        row = self._free_rows.pop()
        self.known[row] = known
        self.limit[row] = limit
        if adapter_slot:
            self.adapter_slot[row] = adapter_slot
            self.num_adapted += 1
        return row

    def shift_rope(self, row: int, offset: int) -> None:
        """Set a new row's `rope_offset`."""
        if offset:
            self.rope_offset[row] = offset
            self.num_shifted += 1

    def drop_row(self, row: int) -> None:
        """Free a row. Its pages must have been released before."""
        if self.adapter_slot[row]:
            self.num_adapted -= 1
        if self.rope_offset[row]:
            self.num_shifted -= 1
        for column in self._columns:
            column[row] = 0
        self._free_rows.append(row)

    def clear(self) -> None:
        """Free all rows."""
        for column in self._columns:
            column[:] = 0
        self.num_adapted = self.num_shifted = 0
        self._free_rows = list(range(self.num_rows - 1, -1, -1))

    def own_pages(self, row: int) -> PageIds:
        """Return the ids of the row's own pages, which are not in the cache, as a copy."""
        return self.page_table[row, self.cached_pages[row] : self.num_pages[row]].copy()
