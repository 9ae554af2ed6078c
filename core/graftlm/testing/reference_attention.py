"""The oracle for attention, which computes each query separately, in float32, over the slots of this query."""

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.errors import InvariantError
from graftlm.layers.kv_codes import cache_rows

__all__ = ["ReferenceAttention"]


class ReferenceAttention(AttentionBackend):
    """A direct implementation of the attention contract, without optimisations.

    Each query gathers exactly the keys and values that it attends to. There are no masks, padding or batches, because
    they could have the same error as a backend under test. An 8-bit cache is converted to float32.
    """

    def __init__(self, context: AttentionContext) -> None:
        self._kv = context.kv
        self._page_size = context.page_size
        self._batch: ForwardBatch | None = None

    def prepare(self, batch: ForwardBatch) -> None:
        """Store the batch for the calls of `forward`."""
        self._batch = batch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write keys and values to the cache, then compute attention; shapes as in `AttentionBackend.forward`.

        Raises:
            InvariantError: `prepare` was not called first.
        """
        batch = self._batch
        if batch is None:
            raise InvariantError("ReferenceAttention.forward was called before prepare(batch)")
        keys, values = cache_rows(self._kv, layer.layer_id)
        keys.write(batch.out_slots, k)
        if layer.value_prefix_dim is None:
            values.write(batch.out_slots, v)

        out = torch.empty((*q.shape[:2], layer.value_dim), dtype=q.dtype, device=q.device)
        for b in range(batch.num_requests):
            slots = self._slots_of(batch, b)
            first, end = int(batch.cu_seqlens_q[b]), int(batch.cu_seqlens_q[b + 1])
            for t in range(first, end):
                position = int(batch.positions[t])
                start = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
                seen = slots[start : position + 1]
                mixed = _attend(q[t], keys.read(seen, torch.float32), values.read(seen, torch.float32), layer)
                out[t] = mixed.to(q.dtype)
        return out.reshape(q.shape[0], -1)

    def _slots_of(self, batch: ForwardBatch, b: int) -> Tensor:
        """Return the slots of all tokens in the context of request b, int64 [seq_len]."""
        position = torch.arange(int(batch.seq_lens[b]), device=batch.page_table.device)
        page = batch.page_table[b].long()[position // self._page_size]
        return page * self._page_size + position % self._page_size


def _attend(q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer) -> Tensor:
    """Compute attention of one query.

    Args:
        q: query, [H, D].
        keys: keys that the query attends to, float32 [S, H_kv, D].
        values: their values, float32 [S, H_kv, D_v].
        layer: the attention layer.

    Returns: the output, float32 [H, D_v].
    """
    groups = layer.num_heads // layer.num_kv_heads
    keys = keys.repeat_interleave(groups, dim=1)  # [S, H, D]
    values = values.repeat_interleave(groups, dim=1)
    scores = torch.einsum("hd,shd->hs", q.float(), keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.sinks is not None:  # a sink is an additional score with a value of zeros
        scores = torch.cat([scores, layer.sinks.float()[:, None]], dim=1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    return torch.einsum("hs,shd->hd", torch.softmax(scores, dim=-1), values)
