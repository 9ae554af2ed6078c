"""A draft model and a draft head without a neural network."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import Continuations, DraftHeadBatch, DraftModelBatch
from graftlm.testing.fake_device import expected_token

__all__ = ["FakeDraftHeads", "FakeDraftModel"]


class FakeDraftModel:
    """A `DraftModel` in which a token's "key and value" is the token's id. Every later token of the sequence reads it.

    If a page is shared, freed or written wrongly, the generated tokens are therefore wrong. Unwritten slots contain -1;
    reading such a slot is an error.

    Args:
        vocab_size: V.
        num_pages: number of pages of the memory.
        page_size: number of tokens in a page.
        context_len: maximum number of tokens in a sequence.
        max_rows: maximum number of sequences in a batch.
        next_token: function that returns the token after a sequence; None: the function of `FakeDevice`.
        probability: reported probability of each generated token.

    Attributes:
        batches: all batches so far, in order.
    """

    def __init__(
        self,
        vocab_size: int,
        num_pages: int = 4096,
        page_size: int = 4,
        *,
        context_len: int = 1024,
        max_rows: int = 64,
        next_token: Callable[[Sequence[int]], int] | None = None,
        probability: float = 0.75,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.context_len = context_len
        self.max_rows = max_rows
        self.batches: list[DraftModelBatch] = []
        self._next_token = next_token or (lambda token_ids: expected_token(token_ids, vocab_size))
        self._probability = probability
        self._slots = np.full(num_pages * page_size, -1, dtype=np.int64)

    def run(self, batch: DraftModelBatch) -> Continuations:
        """Write a batch's tokens to their pages, and generate tokens from the contents of the pages."""
        self.batches.append(batch)
        num_rows, longest = len(batch.query_lens), int(batch.limits.max(initial=0))
        assert 0 < num_rows <= self.max_rows
        assert len(batch.starts) == len(batch.limits) == len(batch.page_table) == num_rows
        assert batch.query_lens.min() >= 1
        assert batch.query_lens.sum() == len(batch.token_ids)
        assert int((batch.starts + batch.query_lens + np.maximum(batch.limits - 1, 0)).max()) <= self.context_len
        found = Continuations(np.zeros((num_rows, longest), np.int32), np.zeros((num_rows, longest), np.float32))
        ends = np.cumsum(batch.query_lens)
        for b in range(num_rows):
            slots = self._slots_of(batch.page_table[b])
            start, length = int(batch.starts[b]), int(batch.query_lens[b])
            self._slots[slots[start : start + length]] = batch.token_ids[ends[b] - length : ends[b]]
            for i in range(int(batch.limits[b])):
                context = self._slots[slots[: start + length + i]]
                assert context.min() >= 0, "a slot was read that was never written"
                token_id = self._next_token(context.tolist())
                found.token_ids[b, i], found.probabilities[b, i] = token_id, self._probability
                if i + 1 < batch.limits[b]:
                    self._slots[slots[start + length + i]] = token_id
        return found

    def _slots_of(self, pages: NDArray[np.int32]) -> NDArray[np.int64]:
        slots: NDArray[np.int64] = (
            pages.astype(np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        ).ravel()
        return slots


class FakeDraftHeads:
    """A `DraftHeads` whose next token is the latest token plus 1.

    Args:
        vocab_size: V; the token after V - 1 is 0.
        room: maximum length of a draft in tokens, as if the requests' pages were full.
        probability: reported probability of each generated token.

    Attributes:
        batches: all batches so far, in order.
        unknown: rows whose hidden state is not known.
    """

    def __init__(self, vocab_size: int, room: int = 64, probability: float = 0.75) -> None:
        self.batches: list[DraftHeadBatch] = []
        self.unknown: set[int] = set()
        self._vocab_size = vocab_size
        self._room = room
        self._probability = probability

    def run(self, batch: DraftHeadBatch) -> Continuations:
        """Draft for a batch; see `DraftHeads.run`."""
        self.batches.append(batch)
        assert batch.lens.min() >= 2
        assert batch.limits.min() >= 1
        limits = np.minimum(batch.limits, self._room)
        steps = np.arange(int(limits.max()))
        is_drafted = (steps < limits[:, None]) & ~np.isin(batch.rows, list(self.unknown))[:, None]
        token_ids = (batch.token_ids[:, None] + steps + 1) % self._vocab_size
        return Continuations(token_ids.astype(np.int32), np.where(is_drafted, self._probability, 0).astype(np.float32))
