"""The draft model of speculative decoding: a model that has its own KV memory and generates greedily."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import AttentionBackend, Continuations, DraftModelBatch, ForwardBatch, Model
from graftlm.execution.batch import to_device
from graftlm.execution.generation import PickedTokens, decode_batch, forward_batch, generate, most_probable
from graftlm.execution.readback import Readback, readback_from
from graftlm.execution.streams import streams_of

__all__ = ["GreedyModel"]


class GreedyModel:
    """Runs batches of a draft model; implements `DraftModel`.

    Generated tokens stay on the device until the batch is complete.

    Args:
        model: the model with its weights, bound to `attention`.
        attention: the model's attention backend, whose KV memory has `num_pages` pages.
        device: device of the model.
        vocab_size: size of the model's vocabulary.
        num_tokens: number of token ids that may be generated: 0 to num_tokens - 1.
        context_len: maximum number of tokens of a sequence.
        max_rows: maximum number of sequences in a batch.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        device: torch.device,
        *,
        vocab_size: int,
        num_tokens: int,
        context_len: int,
        max_rows: int,
        num_pages: int,
        page_size: int,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.max_rows = max_rows
        self.num_pages = num_pages
        self.page_size = page_size
        self._model = model
        self._attention = attention
        self._device = device
        self._num_tokens = num_tokens

    def run(self, batch: DraftModelBatch) -> Continuations:
        """Compute a batch; see `DraftModel.run`."""
        with torch.inference_mode():
            return self._generated(batch).launch_copy(self._readback()).result()

    def _generated(self, batch: DraftModelBatch) -> PickedTokens:
        """Launch the computation of a batch, and the generation of its tokens."""
        order = np.argsort(batch.query_lens != 1, kind="stable")  # sequences with one token come first
        hidden = self._forward(_first_batch(batch, order, self.page_size, self._device))
        kept = np.flatnonzero(batch.limits[order] > 0)
        ends = np.cumsum(batch.query_lens[order], dtype=np.int64) - 1
        hidden = hidden.index_select(0, to_device(ends[kept], self._device))
        lens = (batch.starts + batch.query_lens).astype(np.int64)

        def advance(state: Tensor, token_ids: Tensor, rows: NDArray[np.intp], num_before: int) -> Tensor:
            table = batch.page_table[rows]
            return self._forward(decode_batch(token_ids, lens[rows] + num_before, table, self.page_size, self._device))

        picked = PickedTokens(len(batch.query_lens), int(batch.limits.max(initial=0)))
        generate(hidden, order[kept], batch.limits, self._pick, advance, picked)
        return picked

    def _forward(self, batch: ForwardBatch) -> Tensor:
        self._attention.prepare(batch)
        return self._model.forward(batch)

    def _pick(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return most_probable(self._model.logits(hidden)[:, : self._num_tokens])

    def _readback(self) -> Readback:
        return readback_from(streams_of(self._device))


def _first_batch(batch: DraftModelBatch, order: NDArray[np.intp], page_size: int, device: torch.device) -> ForwardBatch:
    """Return the forward batch of a batch's own tokens, with the sequences in the given order."""
    query_lens, starts, table = batch.query_lens[order], batch.starts[order], batch.page_table[order]
    pieces = np.split(batch.token_ids, np.cumsum(batch.query_lens)[:-1])
    token_ids = np.concatenate([pieces[b] for b in order.tolist()])
    ends = np.cumsum(query_lens, dtype=np.int64)
    of_token = np.repeat(np.arange(len(order)), query_lens)
    positions = np.arange(len(token_ids)) - np.repeat(ends - query_lens, query_lens) + starts[of_token]
    return forward_batch(
        to_device(token_ids.astype(np.int64), device), positions, of_token, query_lens, table, page_size, device
    )
