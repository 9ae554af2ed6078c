"""Applies the repetition, frequency and presence penalties to the logits of tokens in prompt and output."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.execution.batch import to_device
from graftlm.execution.device_rows import take_rows
from graftlm.plan import RowSetup

__all__ = ["Penalties"]


class Penalties:
    """Stores the tokens of penalized rows on the device, and penalizes the logits of these tokens.

    The first penalized request allocates two tables. `counts`, int32 [R, V], has two times the number of the token's
    occurrences in the output, plus 1 if the prompt contains the token. `seen`, int64 [R, n], lists the tokens whose
    count is not 0, possibly with duplicates. The work is therefore proportional to a row's number of tokens, not to the
    vocabulary:

        seen    | the prompt's, once each | output token 0 | output token 1 | ... | drafts of this step

    The index of an output token in `seen` follows from its position. The host can therefore compute the length of a
    list without the values of tokens.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._active = np.zeros(num_rows, dtype=np.bool_)
        self._settings = np.zeros((3, num_rows), dtype=np.float32)  # repetition, frequency, presence
        self._offset = np.zeros(num_rows, dtype=np.int64)  # index of an output token in `seen`, minus its position
        self._counts: Tensor | None = None
        self._seen = torch.zeros(num_rows, 0, dtype=torch.int64, device=device)

    def set_row(self, setup: RowSetup) -> None:
        """Set a row's request, and drop the row's previous state."""
        row, params = setup.row, setup.params
        self._active[row] = params.has_penalties
        if not params.has_penalties:
            return
        self._settings[:, row] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        inside = setup.prompt_token_ids < self._vocab_size  # a prompt may contain ids outside the vocabulary
        prompt = np.unique(setup.prompt_token_ids[inside])
        tokens = np.concatenate([prompt, setup.output_token_ids]).astype(np.int64)
        counts = np.where(np.arange(len(tokens)) < len(prompt), 1, 2).astype(np.int32)
        self._offset[row] = len(prompt) - len(setup.prompt_token_ids)
        self._reserve(len(tokens))
        on_device = to_device(tokens, self._device)
        self._seen[row, : len(tokens)] = on_device
        self._table()[row] = 0
        self._table()[row].index_add_(0, on_device, to_device(counts, self._device))

    def active(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows have penalties, bool [n]."""
        return self._active[rows]

    def apply(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        drafts: NDArray[np.int64] | None = None,
    ) -> None:
        """Penalize logits in place.

        Args:
            logits: float32 [n, V], contiguous.
            rows: int64 [n].
            positions: int64 [n], positions of the sampled tokens.
            drafts: int64 [n, k], the drafts directly before each position, padded with -1; None without drafts.
        """
        local = np.flatnonzero(self._active[rows])
        if len(local) == 0:
            return
        rows, num_seen = rows[local], positions[local] + self._offset[rows[local]]
        if drafts is not None:
            drafts = drafts[local]
            self._list_drafts(rows, num_seen, drafts)
        tokens = self._tokens(rows, num_seen)
        cells = tokens + to_device(local * self._vocab_size, self._device)[:, None]
        counts = self._table().take(tokens + to_device(rows * self._vocab_size, self._device)[:, None])
        if drafts is not None:
            on_device = to_device(drafts, self._device)
            counts = counts + 2 * (tokens[:, :, None] == on_device[:, None, :]).sum(dim=2, dtype=torch.int32)
        repetition, frequency, presence = to_device(self._settings[:, rows], self._device)[:, :, None]
        values = logits.take(cells)
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts > 0, scaled, values)
        num_times = counts >> 1
        values = values - frequency * num_times - presence * (num_times > 0)
        logits.put_(cells, values)  # duplicates of a token have the same value, so their order does not matter

    def count(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        token_ids: Tensor,
        counted: Tensor | None = None,
    ) -> None:
        """Count sampled tokens. Tokens of rows without penalties are ignored.

        Args:
            rows, positions: int64 [n], row and position of each token.
            token_ids: int64 [n], on the device.
            counted: bool [n], on the device: which tokens to count; None: all tokens.
        """
        local = np.flatnonzero(self._active[rows])
        if len(local) == 0:
            return
        rows, places = rows[local], positions[local] + self._offset[rows[local]]
        tokens = take_rows(token_ids, local)
        cells = tokens + to_device(rows * self._vocab_size, self._device)
        twos = torch.full_like(cells, 2, dtype=torch.int32)
        if counted is not None:
            twos *= take_rows(counted, local)
        self._table().view(-1).index_add_(0, cells, twos)
        self._write(rows, places, tokens)

    def _list_drafts(self, rows: NDArray[np.int64], num_seen: NDArray[np.int64], drafts: NDArray[np.int64]) -> None:
        """Write the drafts before each sample to `seen`. A draft is counted only when it has been sampled."""
        depths = (drafts >= 0).sum(axis=1)
        latest = np.flatnonzero(depths)  # each sample adds only the draft directly before it
        ids = drafts[latest, depths[latest] - 1]
        self._write(rows[latest], num_seen[latest] - 1, to_device(ids, self._device))

    def _write(self, rows: NDArray[np.int64], places: NDArray[np.int64], tokens: Tensor) -> None:
        """Write tokens, int64 [n] on the device, to `seen` at (rows, places)."""
        if not len(rows):
            return
        self._reserve(int(places.max()) + 1)
        self._seen.view(-1).index_copy_(0, to_device(rows * self._seen.shape[1] + places, self._device), tokens)

    def _tokens(self, rows: NDArray[np.int64], num_seen: NDArray[np.int64]) -> Tensor:
        """Return the first `num_seen` tokens of each row's list, int64 [n, m], padded with the list's first token."""
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
