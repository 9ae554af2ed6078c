"""Penalties for tokens of the prompt and the output so far: repetition, frequency, presence."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device
from graftlm.execution.device_rows import take_rows
from graftlm.plan import RowSetup
from graftlm.types import TokenIds

__all__ = ["Penalties"]


class Penalties:
    """Stores the tokens of penalized rows on the device, and penalizes the logits of these tokens.

    The first penalized request allocates two tables. `counts`, int32 [R, V], has 2 * (occurrences in the output) plus 1
    if the prompt contains the token. `seen`, int64 [R, n], lists the tokens whose count is not 0, some of them
    repeatedly, so that the work grows with a row's tokens and not with the vocabulary. The length of each list is known
    on the host; the tokens are not.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._active = np.zeros(num_rows, dtype=np.bool_)
        self._settings = np.zeros((3, num_rows), dtype=np.float32)  # repetition, frequency, presence
        self._num_seen = np.zeros(num_rows, dtype=np.int64)
        self._counts: Tensor | None = None
        self._seen = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)

    def set_row(self, setup: RowSetup) -> None:
        """Set a row's request; the row's earlier state is dropped."""
        row, params = setup.row, setup.params
        self._active[row] = params.has_penalties
        if not params.has_penalties:
            return
        self._settings[:, row] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        prompt = np.unique(self._inside(setup.prompt_token_ids))
        output, num_times = np.unique(self._inside(setup.output_token_ids), return_counts=True)
        tokens = np.concatenate([prompt, output])
        counts = np.concatenate([np.ones(len(prompt)), 2 * num_times]).astype(np.int32)
        self._num_seen[row] = len(tokens)
        self._reserve(len(tokens))
        on_device = to_device(tokens, self._device)
        self._seen[row, : len(tokens)] = on_device
        self._table()[row] = 0
        self._table()[row].index_add_(0, on_device, to_device(counts, self._device))

    def active(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows have penalties, bool [n]."""
        return self._active[rows]

    def apply(self, logits: Tensor, rows: NDArray[np.int64]) -> None:
        """Penalize logits, float32 [n, V] and contiguous, in place."""
        local = np.flatnonzero(self._active[rows])
        if len(local) == 0:
            return
        rows = rows[local]
        tokens = self._tokens(rows)
        cells = tokens + to_device(local * self._vocab_size, self._device)[:, None]
        counts = self._table().take(tokens + to_device(rows * self._vocab_size, self._device)[:, None])
        repetition, frequency, presence = to_device(self._settings[:, rows], self._device)[:, :, None]
        values = logits.take(cells)
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts > 0, scaled, values)
        num_times = counts >> 1
        values = values - frequency * num_times - presence * (num_times > 0)
        logits.put_(cells, values)  # duplicates of a token have the same value

    def count(self, rows: NDArray[np.int64], token_ids: Tensor) -> None:
        """Count each row's sampled token, int64 [n] on the device; rows without penalties are skipped."""
        local = np.flatnonzero(self._active[rows])
        if len(local) == 0:
            return
        rows, tokens = rows[local], take_rows(token_ids, local)
        cells = tokens + to_device(rows * self._vocab_size, self._device)
        self._table().view(-1).index_add_(0, cells, torch.full_like(cells, 2, dtype=torch.int32))
        self._reserve(int(self._num_seen[rows].max()) + 1)
        places = rows * self._seen.shape[1] + self._num_seen[rows]
        self._seen.view(-1).index_copy_(0, to_device(places, self._device), tokens)
        self._num_seen[rows] += 1

    def _tokens(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the tokens of rows, int64 [n, m]; shorter rows are padded with their first token."""
        num_seen = self._num_seen[rows]
        width = max(1, int(num_seen.max()))
        self._reserve(width)
        tokens = self._seen[:, :width].index_select(0, to_device(rows, self._device))
        beyond = torch.arange(width, device=self._device) >= to_device(num_seen, self._device)[:, None]
        return torch.where(beyond, tokens[:, :1], tokens)

    def _table(self) -> Tensor:
        if self._counts is None:
            shape = (len(self._active), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._counts

    def _reserve(self, num_tokens: int) -> None:
        """Grow `seen` so that a row can list `num_tokens` tokens."""
        num_rows, size = self._seen.shape
        if num_tokens > size:
            grown = self._seen.new_zeros(num_rows, max(num_tokens, 2 * size))
            grown[:, :size] = self._seen
            self._seen = grown

    def _inside(self, token_ids: TokenIds) -> NDArray[np.int64]:
        """Return the ids below the vocabulary size; a prompt may contain others."""
        return token_ids[token_ids < self._vocab_size].astype(np.int64)
