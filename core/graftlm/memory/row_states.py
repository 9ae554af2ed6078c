"""Tracks the recurrent states of running rows, and plans the segments and snapshots of each step."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import StateSegments
from graftlm.memory.request_table import RequestTable
from graftlm.memory.state_pool import StatePool

__all__ = ["RowStates"]

#: Minimum number of tokens between two snapshots of a row's output.
_OUTPUT_STRIDE: Final = 8


@dataclass(frozen=True, slots=True)
class _Segment:
    """The positions start : end of a row; `source` and `target` are slots. See `StateSegments`."""

    row: int
    start: int
    end: int
    source: int
    target: int


class RowStates:
    """Tracks the slot of each row's state, and takes snapshots at page ends.

        tokens       0 ........ branch ........ last |.. known ................... latest ..... computed
        snapshots               stored        stored |                             kept by the row

    In a prompt, snapshots are taken at these page ends, and are stored for the page when it is cached:
        - `last`, the deepest page end that a request with the same prompt can reuse;
        - `branch`, where the cached keys and values end, if no state was stored there: another prompt shares the tokens
          before it;
        - every `interval` tokens.
    In the output, each row keeps one snapshot, at its latest page end (at least 8 tokens after the previous one). It
    is stored when the row is released.

    A snapshot needs no copy: one segment writes the state to the slot, and the next segment reads it there. The
    segments of a step are computed in the order of their planning, so a row may read a state that another row stores in
    the same step. Slots that a step uses get no other owner before `settle`.

    Args:
        pool: the slots. Slot r + 1 belongs to row r.
        table: the rows.
        page_size: number of tokens in a page.
    """

    def __init__(self, pool: StatePool, table: RequestTable, page_size: int) -> None:
        self.pool = pool
        self._table = table
        self._page_size = page_size
        self._stride = -(-_OUTPUT_STRIDE // page_size) * page_size
        num_rows = table.num_rows
        self._own = np.arange(1, num_rows + 1, dtype=np.int32)
        self._current = np.zeros(num_rows, dtype=np.int32)  # slot of the state after `computed` tokens; 0: initial
        self._kept = np.zeros(num_rows, dtype=np.int32)  # slot of the row's own snapshot; 0: none
        self._kept_len = np.zeros(num_rows, dtype=np.int64)  # number of tokens before this snapshot
        self._branch = np.zeros(num_rows, dtype=np.int64)  # number of tokens before the branch; 0: none
        self._read_page: dict[int, int] = {}  # row -> page whose stored state is the row's current state
        self._unstored: dict[int, list[tuple[int, int]]] = {}  # row -> (number of tokens, slot) of new snapshots
        self._segments: list[_Segment] = []  # those of the chunks of the step that is being planned
        self._retired: list[int] = []  # slots that are freed when the step has been planned
        self._step_pages: list[int] = []  # pages whose states are locked until the step has been planned

    def begin(self, row: int, num_tokens: int, found_tokens: int) -> None:
        """Set a row's state after a match.

        Args:
            num_tokens: number of reused tokens. If it is not 0, the state at their end is stored.
            found_tokens: number of tokens whose keys and values are cached.
        """
        self._unlock_read(row)
        self._branch[row] = found_tokens if found_tokens > num_tokens else 0
        if num_tokens == 0:
            self._current[row] = 0
            return
        self._read_stored(row, num_tokens)
        self.pool.touch(self._read_page[row])

    def plan_chunk(self, row: int, start: int, end: int, interval_tokens: int | None) -> None:
        """Plan the segments of a chunk of a row, start : end, with snapshots within it.

        Args:
            interval_tokens: maximum distance of two snapshots in a prompt; None: unlimited.
        """
        source = int(self._current[row])
        self._let_go(row)
        for cut in self._cuts(row, start, end, interval_tokens):
            slot = self.pool.take()
            if slot is None:
                break
            self._segments.append(_Segment(row, start, cut, source, slot))
            self._unstored.setdefault(row, []).append((cut, slot))
            start, source = cut, slot
        if start < end:
            own = int(self._own[row])
            self._segments.append(_Segment(row, start, end, source, own))
            source = own
        self._current[row] = source

    def store(self, row: int) -> None:
        """Store the row's new snapshots for its cached pages; the row keeps the latest of the others."""
        for num_tokens, slot in self._unstored.pop(row, ()):
            if num_tokens <= int(self._table.cached_pages[row]) * self._page_size:
                self._store(row, num_tokens, slot)
            else:
                if self._kept[row]:
                    self._retired.append(int(self._kept[row]))
                self._kept[row], self._kept_len[row] = slot, num_tokens

    def decode(self, rows: NDArray[np.int32], positions: NDArray[np.int64]) -> StateSegments:
        """Plan one token per row.

        Args:
            positions: int64 [B], position of each row's token.
        """
        sources = self._current[rows]
        targets = self._own[rows]
        for i in np.flatnonzero((positions + 1) % self._stride == 0).tolist():
            row = int(rows[i])
            slot = int(self._kept[row]) or self.pool.take()
            if slot is not None and slot != sources[i]:
                targets[i] = self._kept[row] = slot
                self._kept_len[row] = positions[i] + 1
        self._current[rows] = targets
        if self._read_page:
            for row in rows.tolist():
                self._let_go(row)
        idx = np.arange(len(rows), dtype=np.int32)
        return StateSegments(idx, np.ones_like(idx), sources, targets, len(rows))

    def step(
        self,
        decode_rows: NDArray[np.int32],
        positions: NDArray[np.int64],
        first_token: dict[int, int],
    ) -> StateSegments:
        """Return the segments of a step: the decode rows, then the planned chunks.

        Args:
            positions: int64 [D], position of each decode row's token.
            first_token: row of a chunk -> index of position 0 of the row among the step's tokens, if the step had it.
        """
        decodes = self.decode(decode_rows, positions)
        chunks = np.array(
            [(first_token[s.row] + s.start, s.end - s.start, s.source, s.target) for s in self._segments],
            dtype=np.int32,
        ).reshape(-1, 4)
        return StateSegments(
            np.concatenate((decodes.starts, chunks[:, 0])),
            np.concatenate((decodes.lens, chunks[:, 1])),
            np.concatenate((decodes.sources, chunks[:, 2])),
            np.concatenate((decodes.targets, chunks[:, 3])),
            len(decode_rows),
        )

    def settle(self) -> None:
        """Free and unlock what only the step needed that has just been planned."""
        self._segments.clear()
        for slot in self._retired:
            self.pool.give_back(slot)
        self._retired.clear()
        for page in self._step_pages:
            self.pool.unlock(page)
        self._step_pages.clear()

    def release(self, row: int, num_valid: int) -> None:
        """Store the row's own snapshot for its page, if the page is cached.

        Args:
            num_valid: number of the row's tokens that are part of the request.
        """
        num_tokens, slot = int(self._kept_len[row]), int(self._kept[row])
        if slot and num_tokens <= min(num_valid, int(self._table.cached_pages[row]) * self._page_size):
            self._kept[row] = 0
            if not self.pool.store(self._page_before(row, num_tokens), slot):
                self.pool.give_back(slot)

    def drop_row(self, row: int) -> None:
        """Free the row's own snapshots. The row has no segment in the step that is being planned."""
        self._unlock_read(row)
        snapshots = self._unstored.pop(row, [])
        if self._kept[row]:
            snapshots.append((int(self._kept_len[row]), int(self._kept[row])))
        for _, slot in snapshots:
            self.pool.give_back(slot)
        self._current[row] = self._kept[row] = self._branch[row] = 0

    def clear(self) -> None:
        """Reset all rows and free all slots."""
        self.pool.clear()
        for column in (self._current, self._kept, self._kept_len, self._branch):
            column[:] = 0
        for held in (self._read_page, self._unstored, self._segments, self._retired, self._step_pages):
            held.clear()

    def taken(self) -> list[int]:
        """Return the snapshot slots that rows own, for checks."""
        unstored = [slot for snapshots in self._unstored.values() for _, slot in snapshots]
        return [*self._kept[self._kept != 0].tolist(), *self._retired, *unstored]

    def _cuts(self, row: int, start: int, end: int, interval_tokens: int | None) -> list[int]:
        """Return the page ends within a chunk at which snapshots are taken, in ascending order."""
        size = self._page_size
        cuts = {(int(self._table.known[row]) - 1) // size * size, int(self._branch[row])}
        if interval_tokens is not None:
            interval = -(-interval_tokens // size) * size
            cuts.update(range((start // interval + 1) * interval, end + 1, interval))
        return sorted(cut for cut in cuts if start < cut <= end)

    def _store(self, row: int, num_tokens: int, slot: int) -> None:
        """Store a new snapshot for its cached page. If the page has a state already, the row reads that one."""
        page = self._page_before(row, num_tokens)
        if not self.pool.store(page, slot):
            self._retired.append(slot)
        self.pool.lock(page)
        self._step_pages.append(page)
        if self._current[row] == slot:
            self._read_stored(row, num_tokens)

    def _read_stored(self, row: int, num_tokens: int) -> None:
        """Let a row's current state be the stored state after `num_tokens` tokens, and lock this state."""
        page = self._page_before(row, num_tokens)
        self._current[row] = self.pool.slot_of(page)
        self.pool.lock(page)
        self._read_page[row] = page

    def _let_go(self, row: int) -> None:
        """Let the lock of the stored state that a row reads end with the step that is being planned."""
        page = self._read_page.pop(row, None)
        if page is not None:
            self._step_pages.append(page)

    def _unlock_read(self, row: int) -> None:
        """Unlock the stored state that a row would have read."""
        page = self._read_page.pop(row, None)
        if page is not None:
            self.pool.unlock(page)

    def _page_before(self, row: int, num_tokens: int) -> int:
        return int(self._table.page_table[row, num_tokens // self._page_size - 1])
