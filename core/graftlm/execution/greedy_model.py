"""The draft model of speculative decoding: a model that has its own KV memory and generates greedily."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import AttentionBackend, Continuations, DraftModelBatch, ForwardBatch, Model
from graftlm.execution.batch import to_device

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
        shape = len(batch.query_lens), int(batch.limits.max(initial=0))
        found = Continuations(np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32))
        with torch.inference_mode():
            steps = self._generate(batch)
            if not steps:
                return found
            token_ids = torch.cat([tokens for _, tokens, _ in steps]).int()
            probabilities = torch.cat([probs for _, _, probs in steps])
            both = torch.stack([token_ids, probabilities.view(torch.int32)]).cpu().numpy()  # waits for the device once
        rows = np.concatenate([rows for rows, _, _ in steps])
        positions = np.repeat(np.arange(len(steps)), [len(rows) for rows, _, _ in steps])
        found.token_ids[rows, positions] = both[0]
        found.probabilities[rows, positions] = both[1].view(np.float32)
        return found

    def _generate(self, batch: DraftModelBatch) -> list[tuple[NDArray[np.intp], Tensor, Tensor]]:
        """Generate tokens. Return for each position the sequences with a token there, the tokens and probabilities."""
        order = np.argsort(batch.query_lens != 1, kind="stable")  # sequences with one token come first
        hidden = self._forward(_first_batch(batch, order, self.page_size, self._device))
        kept = np.flatnonzero(batch.limits[order] > 0)
        ends = np.cumsum(batch.query_lens[order], dtype=np.int64) - 1
        hidden = hidden.index_select(0, to_device(ends[kept], self._device))
        rows = order[kept]
        lens = batch.starts[rows] + batch.query_lens[rows]
        steps: list[tuple[NDArray[np.intp], Tensor, Tensor]] = []
        while len(rows):
            token_ids, probabilities = self._most_probable(hidden)
            steps.append((rows, token_ids, probabilities))
            kept = np.flatnonzero(batch.limits[rows] > len(steps))
            if len(kept) < len(rows):
                rows, lens = rows[kept], lens[kept]
                token_ids = token_ids.index_select(0, to_device(kept, self._device))
            if len(rows):
                table = batch.page_table[rows]
                hidden = self._forward(_decode_batch(token_ids, lens, table, self.page_size, self._device))
                lens = lens + 1
        return steps

    def _forward(self, batch: ForwardBatch) -> Tensor:
        self._attention.prepare(batch)
        return self._model.forward(batch)

    def _most_probable(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable token of each of B hidden states, int64 [B], and its probability, float32 [B]."""
        logits = self._model.logits(hidden)[:, : self._num_tokens].float()
        largest, token_ids = logits.max(dim=1)
        return token_ids, torch.exp(largest - torch.logsumexp(logits, dim=1))


def _first_batch(batch: DraftModelBatch, order: NDArray[np.intp], page_size: int, device: torch.device) -> ForwardBatch:
    """Return the forward batch of a batch's own tokens, with the sequences in the given order."""
    query_lens, starts, table = batch.query_lens[order], batch.starts[order], batch.page_table[order]
    pieces = np.split(batch.token_ids, np.cumsum(batch.query_lens)[:-1])
    token_ids = np.concatenate([pieces[b] for b in order.tolist()])
    ends = np.cumsum(query_lens, dtype=np.int64)
    of_token = np.repeat(np.arange(len(order)), query_lens)
    positions = np.arange(len(token_ids)) - np.repeat(ends - query_lens, query_lens) + starts[of_token]
    return _forward_batch(
        to_device(token_ids.astype(np.int64), device), positions, of_token, query_lens, table, page_size, device
    )


def _decode_batch(
    token_ids: Tensor, lens: NDArray[np.int32], table: NDArray[np.int32], page_size: int, device: torch.device
) -> ForwardBatch:
    """Return the forward batch of one generated token per sequence, at positions `lens`."""
    of_token = np.arange(len(lens))
    return _forward_batch(token_ids, lens.astype(np.int64), of_token, np.ones_like(lens), table, page_size, device)


def _forward_batch(
    token_ids: Tensor,
    positions: NDArray[np.int64],
    of_token: NDArray[np.int64],
    query_lens: NDArray[np.int32],
    table: NDArray[np.int32],
    page_size: int,
    device: torch.device,
) -> ForwardBatch:
    ends = np.cumsum(query_lens, dtype=np.int32)
    seq_lens = (positions[ends - 1] + 1).astype(np.int32)
    out_slots = table[of_token, positions // page_size].astype(np.int64) * page_size + positions % page_size
    return ForwardBatch(
        input_ids=token_ids,
        positions=to_device(positions, device),
        out_slots=to_device(out_slots, device),
        cu_seqlens_q=to_device(np.concatenate([np.zeros(1, dtype=np.int32), ends]), device),
        seq_lens=to_device(seq_lens, device),
        page_table=to_device(table, device),
        logits_idx=to_device(ends.astype(np.int64) - 1, device),
        num_decodes=int((query_lens == 1).sum()),
        query_lens_cpu=query_lens,
        seq_lens_cpu=seq_lens,
        page_table_cpu=table,
    )
