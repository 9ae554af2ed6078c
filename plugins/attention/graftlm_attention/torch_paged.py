"""Paged attention with PyTorch's own operations, for any device, dtype and head size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch
from graftlm.errors import InvariantError
from graftlm.layers import cache_rows

__all__ = ["TorchPagedAttention"]

# Number of queries of a chunk that are computed together. It limits the size of the mask. Early blocks do not read keys
# that come after all their queries.
_BLOCK_TOKENS = 256
# Number of context tokens that are gathered together for one-token requests. It limits the size of the gathered copy.
_GROUP_TOKENS = 16384
# Lower limit of a group's shortest context relative to its longest. This limits the padding.
_GROUP_FILL = 0.75


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries that are computed together: n consecutive tokens of one request, or one token each of b requests.

    Attributes:
        tokens: indices of the b * n tokens in the batch.
        slots: the b * S slots of their contexts: a slice if they are consecutive, otherwise int64 [b * S]. Padding
            repeats a slot that the request attends to; the mask excludes it.
        num_requests: b, the number of requests.
        mask: added to the scores, [b, 1, n, S]; None if every query attends to all S positions, or if `causal` is true.
        causal: whether S = n, and query i attends to the first i + 1 positions.
    """

    tokens: slice | Tensor
    slots: slice | Tensor
    num_requests: int
    mask: Tensor | None
    causal: bool = False


class TorchPagedAttention(AttentionBackend):
    """Attention with `scaled_dot_product_attention` over gathered pages.

    Chunks are computed one request at a time. One-token requests of similar length are computed together: the query
    heads of a key/value head are passed to PyTorch as if they were query positions, because then keys and values need
    not be repeated for each head.
    """

    kernel = "torch"

    def __init__(self, context: AttentionContext) -> None:
        self._page_size = context.page_size
        self._device = context.device
        self._dtype = context.dtype
        self._windows = {layer.sliding_window for layer in context.layers}
        self._rows = [cache_rows(context.kv, layer.layer_id) for layer in context.layers]
        self._batch: ForwardBatch | None = None
        self._pieces: dict[int | None, tuple[_Piece, ...]] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        """Compute slots and masks, once for each distinct sliding window of the layers."""
        self._batch = batch
        self._pieces = {window: tuple(self._plan(batch, window)) for window in self._windows}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write keys and values, then compute attention; the contract defines the shapes.

        Raises:
            InvariantError: called before `prepare`.
        """
        if self._batch is None:
            raise InvariantError("TorchPagedAttention.forward was called before prepare(batch)")
        keys, values = self._rows[layer.layer_id]
        keys.write(self._batch.out_slots, k)
        if layer.value_prefix_dim is None:
            values.write(self._batch.out_slots, v)
        out = torch.empty((*q.shape[:2], layer.value_dim), dtype=q.dtype, device=q.device)
        for piece in self._pieces[layer.sliding_window]:
            seen = keys.read(piece.slots, q.dtype)
            prefix = layer.value_prefix_dim
            mixed = values.read(piece.slots, q.dtype) if prefix is None else seen[..., :prefix]
            out[piece.tokens] = _attend(q[piece.tokens], seen, mixed, piece, layer)
        return out.view(q.shape[0], -1)

    def _plan(self, batch: ForwardBatch, window: int | None) -> Iterator[_Piece]:
        yield from self._plan_decodes(batch, window)
        token = batch.num_decodes
        for b in range(batch.num_decodes, batch.num_requests):
            num_tokens, end = int(batch.query_lens_cpu[b]), int(batch.seq_lens_cpu[b])
            for i in range(0, num_tokens, _BLOCK_TOKENS):
                n = min(_BLOCK_TOKENS, num_tokens - i)
                yield self._plan_block(batch, b, slice(token + i, token + i + n), end - num_tokens + i, window)
            token += num_tokens

    def _plan_block(self, batch: ForwardBatch, b: int, tokens: slice, position: int, window: int | None) -> _Piece:
        """Plan consecutive tokens of request b; `position` is the position of the first one in the context."""
        n = tokens.stop - tokens.start
        start = _oldest(position, window)
        slots = self._slots(batch.page_table_cpu[b], np.arange(start, position + n))
        if position == 0 and (window is None or window >= n):
            return _Piece(tokens, self._index(slots), 1, mask=None, causal=True)
        query = np.arange(position, position + n)[:, None]
        key = np.arange(start, position + n)[None, :]
        hidden = key > query if window is None else (key > query) | (key <= query - window)
        return _Piece(tokens, self._index(slots), 1, self._mask(hidden[None]))

    def _plan_decodes(self, batch: ForwardBatch, window: int | None) -> Iterator[_Piece]:
        """Plan the one-token requests, in groups of similar length."""
        ends = batch.seq_lens_cpu[: batch.num_decodes].astype(np.int64)
        starts = np.array([_oldest(end - 1, window) for end in ends.tolist()], dtype=np.int64)
        for group in _group_by_length(ends - starts):
            lengths = (ends - starts)[group][:, None]  # [b, 1]
            offsets = np.arange(lengths.max())[None, :]  # [1, S]
            hidden = offsets >= lengths
            positions = starts[group][:, None] + np.where(hidden, 0, offsets)
            slots = self._slots(batch.page_table_cpu[group], positions)
            mask = self._mask(hidden[:, None]) if hidden.any() else None
            yield _Piece(self._index(group), self._index(slots.reshape(-1)), len(group), mask)

    def _slots(self, pages: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slots of positions [..., S], from rows of the page table [..., P]."""
        page = np.take_along_axis(pages, positions // self._page_size, axis=-1).astype(np.int64)
        return page * self._page_size + positions % self._page_size

    def _index(self, indices: NDArray[np.int64]) -> slice | Tensor:
        """Return indices as a slice if they are consecutive, because a slice needs no copy, otherwise as a tensor."""
        first = int(indices[0])
        if (np.diff(indices) == 1).all():
            return slice(first, first + len(indices))
        return self._to_device(indices)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        """Return the mask to add to scores, [b, 1, n, S]: -inf where `hidden`, bool [b, n, S], is true, otherwise 0."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self._to_device(hidden), -torch.inf).unsqueeze(1)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        """Copy a contiguous array to the device. The copy to a GPU is asynchronous, from pinned memory."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _oldest(position: int, window: int | None) -> int:
    """Return the first position that a query at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


def _group_by_length(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Group requests of similar length, which limits padding and memory. Yields indices into `lengths`, ascending."""
    order = np.argsort(-lengths, kind="stable")
    first = 0
    for i in range(1, len(order) + 1):
        longest = int(lengths[order[first]])
        if i < len(order):
            fits = (i - first + 1) * longest <= _GROUP_TOKENS
            if fits and lengths[order[i]] >= _GROUP_FILL * longest:
                continue
        yield np.sort(order[first:i])
        first = i


def _attend(q: Tensor, keys: Tensor, values: Tensor, piece: _Piece, layer: AttentionLayer) -> Tensor:
    """Return the attention of queries [b * n, H, D] over keys [b * S, H_kv, D] and values [b * S, H_kv, D_v].

    Returns: [b * n, H, D_v].
    """
    b, n = piece.num_requests, q.shape[0] // piece.num_requests
    group = layer.num_heads // layer.num_kv_heads
    k = keys.view(b, -1, layer.num_kv_heads, layer.head_dim).transpose(1, 2)  # [b, H_kv, S, D]
    v = values.reshape(b, -1, layer.num_kv_heads, layer.value_dim).transpose(1, 2)  # [b, H_kv, S, D_v]
    if layer.soft_cap is not None or layer.sinks is not None or layer.value_prefix_dim is not None:
        return _attend_step_by_step(q, k, v, piece, layer)
    if n == 1:
        q = q.reshape(b, layer.num_kv_heads, group, layer.head_dim)
        mask = None if piece.mask is None else piece.mask.expand(-1, -1, group, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=layer.scale)  # [b, H_kv, G, D]
        return out.reshape(b, layer.num_heads, layer.head_dim)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),  # [1, H, n, D]
        k,
        v,
        attn_mask=piece.mask,
        is_causal=piece.causal,
        scale=layer.scale,
        enable_gqa=group > 1,
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_step_by_step(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, layer: AttentionLayer) -> Tensor:
    """Compute attention in float32, with features that PyTorch's fused attention lacks: soft caps, sinks, D_v below D.

    Args:
        q: [b * n, H, D].
        k: [b, H_kv, S, D].
        v: [b, H_kv, S, D_v].

    Returns: [b * n, H, D_v], in q's dtype.
    """
    b, n = piece.num_requests, q.shape[0] // piece.num_requests
    group, seen, dtype = layer.num_heads // layer.num_kv_heads, k.shape[2], q.dtype
    q = q.reshape(b, n, layer.num_kv_heads, group, layer.head_dim).permute(0, 2, 3, 1, 4)  # [b, H_kv, G, n, D]
    q = q.float().reshape(b, layer.num_kv_heads, group * n, layer.head_dim)
    scores = (q @ k.float().transpose(2, 3)) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.view(b, layer.num_kv_heads, group, n, seen)
    if piece.causal:
        scores += torch.full((n, seen), -torch.inf, device=scores.device).triu_(1)
    elif piece.mask is not None:
        scores += piece.mask.unsqueeze(1)
    weights = _softmax(scores, layer).view(b, layer.num_kv_heads, group * n, seen)
    out = (weights @ v.float()).view(b, layer.num_kv_heads, group, n, layer.value_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(b * n, layer.num_heads, layer.value_dim).to(dtype)


def _softmax(scores: Tensor, layer: AttentionLayer) -> Tensor:
    """Return the softmax of scores, [b, H_kv, G, n, S]. Sinks take part in the softmax, but are not in the result."""
    if layer.sinks is None:
        return scores.softmax(dim=-1)
    sinks = layer.sinks.float().view(layer.num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1].contiguous()
