"""The attention backend, which gathers each request's keys and values from pages and computes in float32."""

from dataclasses import dataclass

import torch
from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from torch import Tensor

from graftlm_new_plugin.options import GatherOptions

__all__ = ["GatherAttention"]


@dataclass(frozen=True, slots=True)
class _Request:
    """The data of one request for `forward`.

    Attributes:
        first, end: range of the request's tokens in the batch; `end` is exclusive.
        position: position of token `first` in the request.
        slots: slots of all tokens of the request, including those of this step, int64 [context length].
    """

    first: int
    end: int
    position: int
    slots: Tensor


class GatherAttention(AttentionBackend):
    """A backend that computes attention separately for each request: simple and exact, but slow for many requests."""

    def __init__(self, options: GatherOptions, context: AttentionContext) -> None:
        self._queries_at_once = options.queries_at_once
        self._kv = context.kv
        self._page_size = context.page_size
        self._out_slots = torch.empty(0, dtype=torch.int64, device=context.device)
        self._requests: list[_Request] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute the slots of every request, once for all layers."""
        self._out_slots = batch.out_slots
        self._requests = []
        first = 0
        for b in range(batch.num_requests):
            query_len, context_len = int(batch.query_lens_cpu[b]), int(batch.seq_lens_cpu[b])
            num_pages = -(-context_len // self._page_size)
            pages = batch.page_table[b, :num_pages].long()
            in_page = torch.arange(self._page_size, device=pages.device)
            slots = (pages[:, None] * self._page_size + in_page).flatten()[:context_len]
            self._requests.append(_Request(first, first + query_len, context_len - query_len, slots))
            first += query_len

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write the keys and values of all requests, then compute attention. The contract defines the shapes."""
        keys = self._kv.keys(layer.layer_id).view(-1, layer.num_kv_heads, layer.head_dim)  # [slots, H_kv, D]
        values = self._kv.values(layer.layer_id).view(-1, layer.num_kv_heads, layer.head_dim)
        keys[self._out_slots] = k
        values[self._out_slots] = v
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for request in self._requests:
            for first in range(request.first, request.end, self._queries_at_once):
                end = min(first + self._queries_at_once, request.end)
                position = request.position + first - request.first
                start = _first_seen(position, layer)
                # Slots before the window are not read: their pages may contain another request's tokens.
                slots = request.slots[start : position + end - first]
                out[first:end] = _attend(q[first:end], keys[slots], values[slots], position - start, layer)
        return out.flatten(1)


def _first_seen(position: int, layer: AttentionLayer) -> int:
    return 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)


def _attend(q: Tensor, keys: Tensor, values: Tensor, num_before: int, layer: AttentionLayer) -> Tensor:
    """Compute attention for consecutive queries of one request.

    Args:
        q: queries, [n, H, D].
        keys, values: [s, H_kv, D]; the last n belong to the tokens of the queries.
        num_before: number of keys before the key of the first query's token.

    Returns: [n, H, D], in the dtype of q.
    """
    groups = layer.num_heads // layer.num_kv_heads
    heads = q.float().reshape(-1, layer.num_kv_heads, groups, layer.head_dim)  # [n, H_kv, G, D]
    scores = torch.einsum("nhgd,shd->hgns", heads, keys.float()) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    at = torch.arange(q.shape[0], device=q.device)[:, None] + num_before  # [n, 1]
    seen = torch.arange(keys.shape[0], device=q.device)  # [s]
    hidden = seen > at
    if layer.sliding_window is not None:
        hidden |= seen <= at - layer.sliding_window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return torch.einsum("hgns,shd->nhgd", weights, values.float()).flatten(1, 2).to(q.dtype)
