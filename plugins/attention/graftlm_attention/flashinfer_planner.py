"""FlashInfer's wrappers for one kind of attention layer: made when first needed, planned once a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from graftlm.contracts import AttentionLayer, ForwardBatch
from graftlm_attention.flashinfer_indices import RaggedPages, on_host, ragged_pages, shared_pages, shared_prefix
from graftlm_attention.flashinfer_library import FlashInferLibrary, PagedWrapper
from graftlm_attention.options import FlashInferOptions

__all__ = ["CudaFence", "Fence", "LayerKind", "LayerPlanner", "NoFence", "Part"]

_LAYOUT = "NHD"
#: From so many query heads of a key/value head on, decodes run on tensor cores. FlashInfer's other kernel is compiled
#: for fewer, and wins only where there is little to multiply.
_TENSOR_CORE_GROUP = 4
#: What FlashInfer's wrappers take for the integers of a plan.
_PLAN_BYTES = 8 << 20
#: Fewer requests gain less from reading a prefix once than merging costs.
_MIN_CASCADE_REQUESTS = 2


class Fence(Protocol):
    """A moment in the device's work that the host can wait for."""

    def wait(self) -> None:
        """Wait for the moment that was recorded last, if any was."""
        ...

    def record(self) -> None:
        """Record what has been launched so far."""
        ...


class CudaFence:
    """A fence in the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait; not at all where the loop commits a step before it plans the next but one, as graftlm's does."""
        self._event.synchronize()

    def record(self) -> None:
        """Record the event."""
        self._event.record()


class NoFence:
    """A fence where nothing runs later than it is launched."""

    def wait(self) -> None:
        """Do nothing."""

    def record(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a plan depends on, and layers may have in common; as in `AttentionLayer`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None

    @classmethod
    def of(cls, layer: AttentionLayer) -> "LayerKind":
        """Return a layer's kind."""
        return cls(
            layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.scale, layer.sliding_window, layer.soft_cap
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a batch that one wrapper serves.

    Attributes:
        tokens: which.
        attend: attend(q, (keys, values), out) writes their [n, H, D].
    """

    tokens: slice
    attend: Callable[[Tensor, tuple[Tensor, Tensor], Tensor], None]


@dataclass(slots=True)
class _Fenced:
    """A wrapper with its fence: the buffer from which a plan is copied must not be written before the copy is done."""

    wrapper: PagedWrapper
    fence: Fence

    def plan(self, *arguments: Any, **settings: Any) -> None:
        self.fence.wait()
        self.wrapper.plan(*arguments, **settings)
        self.fence.record()


@dataclass(slots=True)
class _GraphBuffers:
    """What the wrappers of all graph sizes share: one graph runs at a time, and is planned for right before.

    Attributes:
        indices: int32, page ids of the largest batch.
        plan: uint8, the integers of a plan.
    """

    indices: Tensor
    plan: Tensor
    wrappers: dict[int, _Fenced] = field(default_factory=dict)


class LayerPlanner:
    """Chooses the wrappers of a step for layers of one kind, and plans them.

    One-token requests take the decode wrapper, others the prefill wrapper. A batch whose requests all begin with the
    same pages takes the cascade wrapper: it reads those once for all queries, and merges. A batch that a graph replays
    takes the decode wrapper that was captured with its size.

    Args:
        kind: the layers.
        library: makes wrappers.
        workspace: uint8, for partial results; wrappers that run one after the other may share it.
        page_size: tokens in a page.
        dtype: of queries, keys and values.
        make_fence: one for each wrapper.
    """

    def __init__(
        self,
        kind: LayerKind,
        library: FlashInferLibrary,
        workspace: Tensor,
        page_size: int,
        dtype: torch.dtype,
        options: FlashInferOptions,
        make_fence: Callable[[], Fence],
    ) -> None:
        self._kind = kind
        self._library = library
        self._workspace = workspace
        self._page_size = page_size
        self._options = options
        self._make_fence = make_fence
        self._shape = (kind.num_heads, kind.num_kv_heads, kind.head_dim, page_size)
        self._settings = {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.sliding_window is None else kind.sliding_window - 1,
            "logits_soft_cap": kind.soft_cap,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._eager: dict[str, _Fenced] = {}
        self._graphs: _GraphBuffers | None = None

    def plan(self, batch: ForwardBatch) -> tuple[Part, ...]:
        """Plan a step; the parts cover its tokens in order."""
        if batch.in_graph:
            return (self._plan_decodes(batch, self._graph_wrapper(batch)),)
        num_shared = self._num_cascaded(batch)
        if num_shared:
            return (self._plan_cascade(batch, num_shared),)
        parts: list[Part] = []
        if batch.num_decodes:
            parts.append(self._plan_decodes(batch, self._wrapper("decode", self._make_decode)))
        if batch.num_requests > batch.num_decodes:
            parts.append(self._plan_chunks(batch, self._wrapper("prefill", self._make_prefill)))
        return tuple(parts)

    def _num_cascaded(self, batch: ForwardBatch) -> int:
        """Return how many pages to read once for all requests."""
        least = self._options.cascade_tokens
        if least is None or self._kind.sliding_window is not None or batch.num_requests < _MIN_CASCADE_REQUESTS:
            return 0
        num_shared = shared_pages(batch, self._page_size)
        return num_shared if num_shared * self._page_size >= least else 0

    def _plan_decodes(self, batch: ForwardBatch, fenced: _Fenced) -> Part:
        pages = self._pages(batch, slice(0, batch.num_decodes))
        fenced.plan(pages.indptr, pages.indices, pages.last_page_len, *self._shape, **self._settings)
        return Part(slice(0, batch.num_decodes), _into(fenced.wrapper))

    def _plan_chunks(self, batch: ForwardBatch, fenced: _Fenced) -> Part:
        first, num_requests = batch.num_decodes, batch.num_requests
        pages = self._pages(batch, slice(first, num_requests))
        token_ends = self._token_ends(batch, first)
        fenced.plan(
            token_ends, pages.indptr, pages.indices, pages.last_page_len, *self._shape, causal=True, **self._settings
        )
        return Part(slice(first, batch.num_tokens), _into(fenced.wrapper))

    def _plan_cascade(self, batch: ForwardBatch, num_shared: int) -> Part:
        fenced = self._wrapper("cascade", lambda: self._library.cascade(2, self._workspace, _LAYOUT))
        shared = shared_prefix(batch, num_shared, self._page_size)
        rest = ragged_pages(batch, slice(0, batch.num_requests), self._page_size, num_shared=num_shared)
        ends = self._token_ends(batch, 0)
        all_tokens = on_host(np.array([0, batch.num_tokens], dtype=np.int32), batch.page_table.device)
        fenced.plan(
            [all_tokens, ends],
            [shared.indptr, rest.indptr],
            [shared.indices, rest.indices],
            [shared.last_page_len, rest.last_page_len],
            *self._shape,
            causal=True,  # of the rest; the shared pages lie before all queries
            **self._settings,
        )
        return Part(slice(0, batch.num_tokens), _copied(fenced.wrapper))

    def _pages(self, batch: ForwardBatch, requests: slice) -> RaggedPages:
        return ragged_pages(batch, requests, self._page_size, self._kind.sliding_window)

    def _token_ends(self, batch: ForwardBatch, first: int) -> Tensor:
        """Return where the tokens of each request from `first` on begin and end, int32 on the host."""
        query_lens = batch.query_lens_cpu[first:]
        ends = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=ends[1:])
        return on_host(ends, batch.page_table.device)

    def _wrapper(self, role: str, make: Callable[[], PagedWrapper]) -> _Fenced:
        if role not in self._eager:
            self._eager[role] = _Fenced(make(), self._make_fence())
        return self._eager[role]

    def _make_prefill(self) -> PagedWrapper:
        return self._library.prefill(self._workspace, _LAYOUT, backend=self._options.backend)

    def _make_decode(self, **buffers: Any) -> PagedWrapper:
        group = self._kind.num_heads // self._kind.num_kv_heads
        return self._library.decode(self._workspace, _LAYOUT, use_tensor_cores=group >= _TENSOR_CORE_GROUP, **buffers)

    def _graph_wrapper(self, batch: ForwardBatch) -> _Fenced:
        """Return the wrapper whose buffers the graph of this size reads."""
        graphs, size, device = self._graphs, batch.num_requests, batch.page_table.device
        if graphs is None or graphs.indices.numel() < batch.page_table.numel():
            indices = torch.zeros(batch.page_table.numel(), dtype=torch.int32, device=device)
            plan = torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device)
            graphs = self._graphs = _GraphBuffers(indices, plan, {} if graphs is None else graphs.wrappers)
        if size not in graphs.wrappers:
            wrapper = self._make_decode(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=graphs.indices,
                paged_kv_last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=device),
            )
            wrapper.reset_workspace_buffer(self._workspace, graphs.plan)
            graphs.wrappers[size] = _Fenced(wrapper, self._make_fence())
        return graphs.wrappers[size]


def _into(wrapper: PagedWrapper) -> Callable[[Tensor, tuple[Tensor, Tensor], Tensor], None]:
    """Return the `attend` of a wrapper that writes where it is told."""

    def attend(q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        wrapper.run(q, kv, out=out)

    return attend


def _copied(wrapper: PagedWrapper) -> Callable[[Tensor, tuple[Tensor, Tensor], Tensor], None]:
    """Return the `attend` of a wrapper that allocates its result."""

    def attend(q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        out.copy_(wrapper.run(q, kv))

    return attend
