"""Runs ragged batches of a model without an engine, with a paged KV cache and the reference attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from graftlm.contracts import AttentionBackend, AttentionContext, AttentionLayer, ForwardBatch, Model
from graftlm.execution.kv_store import KVStore
from graftlm.execution.state_store import StateStore
from graftlm.testing.batches import make_batch, make_state_batch
from graftlm.testing.reference_attention import ReferenceAttention

__all__ = ["PagedModel", "Tokens"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one request in a step.

    Attributes:
        row: number of the request, from 0 to max_requests - 1. A row has the same pages in all steps.
        token_ids: consecutive tokens.
        start: position of the first of these tokens in the request.
        store_at: for a model with state layers, position before which the row's state is stored; between `start` and
            the position after the last token. None: it is not stored.
        from_stored: whether the row's stored state is read, instead of the state after the row's last step.
    """

    row: int
    token_ids: Sequence[int]
    start: int = 0
    store_at: int | None = None
    from_stored: bool = False


class PagedModel:
    """A loaded model with a paged KV cache, whose pages are in random order and contain NaN until they are written.

    States contain NaN until they are written, too.

    Args:
        model: model with weights and without a bound attention backend.
        page_size: number of tokens in a page.
        max_requests: number of rows.
        max_context_len: maximum number of tokens of a row.
        dtype: dtype of the model.
        seed: seed for the random order of pages.

    Attributes:
        model: the model.
        backend: the attention backend that is bound to the model.
    """

    def __init__(
        self,
        model: Model,
        *,
        page_size: int = 4,
        max_requests: int = 8,
        max_context_len: int = 64,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.model = model
        self._page_size = page_size
        pages_per_row = -(-max_context_len // page_size)
        num_pages = max_requests * pages_per_row
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
        self._page_tables = order.view(max_requests, pages_per_row).tolist()
        layers, device = model.attention_layers, torch.device("cpu")
        kv = KVStore(layers, num_pages, page_size, dtype, device)
        for layer_id in range(len(layers)):
            kv.keys(layer_id).fill_(torch.nan)
            kv.values(layer_id).fill_(torch.nan)
        context = AttentionContext(layers, kv, page_size, device, dtype, max_requests, max_context_len)
        self.backend = RecordingAttention(ReferenceAttention(context))
        model.bind_attention(self.backend)
        self._num_rows = max_requests
        if model.state_layers:
            states = StateStore(model.state_layers, 1 + 2 * max_requests, device)
            for tensors in states.tensors:
                for tensor in tensors:
                    tensor[1:] = torch.nan
            model.bind_states(states.tensors)

    def step(self, requests: Sequence[Tokens]) -> list[Tensor]:
        """Run one batch; return each request's hidden states, [tokens, hidden], in the order of `requests`."""
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids) > 1)
        batch = self._batch([requests[i] for i in order])
        pieces = self._forward(batch).split_with_sizes(batch.query_lens_cpu.tolist())
        by_request = dict(zip(order, pieces, strict=True))
        return [by_request[i] for i in range(len(requests))]

    def step_wanted(self, requests: Sequence[Tokens], wanted_idx: Sequence[int]) -> Tensor:
        """Run one batch of a model whose `selects_tokens` is true.

        Args:
            requests: the batch; requests with one token come first.
            wanted_idx: indices of W tokens in the batch.

        Returns: the hidden states of the W tokens, [W, hidden].
        """
        return self._forward(replace(self._batch(requests), wanted_idx=torch.tensor(wanted_idx)))

    def step_with_inputs(self, request: Tokens, layers: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Run one request; return its hidden states, [tokens, hidden], and the inputs of some layers."""
        batch = self._batch([request])
        self.backend.prepare(batch)
        return self.model.forward_with_inputs(batch, layers)

    def _batch(self, requests: Sequence[Tokens]) -> ForwardBatch:
        tokens = [(request.token_ids, request.start) for request in requests]
        batch = make_batch(tokens, [self._page_tables[request.row] for request in requests], self._page_size)
        if not self.model.state_layers:
            return batch
        num_decodes = next(
            (i for i, it in enumerate(requests) if len(it.token_ids) > 1 or it.store_at is not None), len(requests)
        )
        return replace(batch, state=make_state_batch(self._segments(requests), num_decodes))

    def _segments(self, requests: Sequence[Tokens]) -> list[tuple[int, int, int, int]]:
        """Return the segments of each request: slot 1 + row has the row's state, and the slots after these store."""
        segments, first = [], 0
        for request in requests:
            own, stored = 1 + request.row, 1 + self._num_rows + request.row
            source = stored if request.from_stored else own if request.start else 0
            num_tokens = len(request.token_ids)
            if request.store_at is not None:
                num_before = request.store_at - request.start
                segments.append((first, num_before, source, stored))
                first, num_tokens, source = first + num_before, num_tokens - num_before, stored
            if num_tokens:
                segments.append((first, num_tokens, source, own))
            first += num_tokens
        return segments

    def _forward(self, batch: ForwardBatch) -> Tensor:
        self.backend.prepare(batch)
        return self.model.forward(batch)

    def run_in_chunks(self, token_ids: Sequence[int], chunk_len: int, row: int = 0) -> Tensor:
        """Run one request with `chunk_len` tokens per step; return all hidden states, [tokens, hidden]."""
        starts = range(0, len(token_ids), chunk_len)
        steps = [self.step([Tokens(row, token_ids[start : start + chunk_len], start)]) for start in starts]
        return torch.cat([hidden for (hidden,) in steps])


class RecordingAttention(AttentionBackend):
    """An attention backend that forwards all calls to another one, and records the calling layers.

    Attributes:
        calls: layer of each call of `forward` since the last `prepare`.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.calls: list[AttentionLayer] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Clear the recorded calls and prepare the other backend."""
        self.calls.clear()
        self._inner.prepare(batch)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Record the layer and call the other backend."""
        self.calls.append(layer)
        return self._inner.forward(q, k, v, layer)
