"""Changes the logits of single tokens, for `logit_bias` and `min_tokens`."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.errors import SamplingParamsError
from graftlm.execution.batch import to_device
from graftlm.plan import RowSetup

__all__ = ["TokenEdits"]


class TokenEdits:
    """Stores and applies `logit_bias` and `min_tokens` of each row. The data is on the host until it is applied."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._biased = np.zeros(num_rows, dtype=np.bool_)
        self._first_stop = np.zeros(num_rows, dtype=np.int64)  # first position at which stop tokens are allowed
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._stops: dict[int, NDArray[np.int64]] = {}

    def set_row(self, setup: RowSetup) -> None:
        """Set a row's request.

        Raises:
            SamplingParamsError: `logit_bias` has a token outside the vocabulary.
        """
        row, params = setup.row, setup.params
        self._biased[row] = False
        stops = np.array([token for token in setup.stop_token_ids if token < self._vocab_size], dtype=np.int64)
        self._stops[row] = stops
        self._first_stop[row] = len(setup.prompt_token_ids) + params.min_tokens if len(stops) else 0
        if not params.logit_bias:
            return
        tokens = np.array(list(params.logit_bias), dtype=np.int64)
        if tokens.max() >= self._vocab_size:
            raise SamplingParamsError(
                f"logit_bias has token {tokens.max()}, but the vocabulary has {self._vocab_size} tokens"
            )
        self._biases[row] = (tokens, np.array(list(params.logit_bias.values()), dtype=np.float32))
        self._biased[row] = True

    def active(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows' logits are changed at these positions, bool [n]."""
        return self._biased[rows] | (positions < self._first_stop[rows])

    def apply(self, logits: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Add the biases, then set the logits of forbidden stop tokens to -inf, in place.

        Args:
            logits: float32 [n, V], contiguous.
            rows: int64 [n].
            positions: int64 [n], positions of the sampled tokens.
        """
        cells = logits.view(-1)
        biased = np.flatnonzero(self._biased[rows])
        if len(biased):
            tokens, values = zip(*[self._biases[row] for row in rows[biased].tolist()], strict=True)
            added = to_device(np.concatenate(values), self._device)
            cells.index_add_(0, self._cells(biased, tokens), added)
        early = np.flatnonzero(positions < self._first_stop[rows])
        if len(early):
            stops = [self._stops[row] for row in rows[early].tolist()]
            cells.index_fill_(0, self._cells(early, stops), -torch.inf)

    def _cells(
        self, local: NDArray[np.int64], tokens: "list[NDArray[np.int64]] | tuple[NDArray[np.int64], ...]"
    ) -> Tensor:
        """Return the flat indices in the logits of each row's list of tokens."""
        starts = np.repeat(local * self._vocab_size, [len(ids) for ids in tokens])
        return to_device(starts + np.concatenate(tokens), self._device)
