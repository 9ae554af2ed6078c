"""FlashInfer's wrappers for one kind of attention layer: created at first use, planned once per step."""

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
#: Decodes run on tensor cores if a key/value head has at least this number of query heads. FlashInfer's decode kernel
#: without tensor cores is compiled for smaller groups, and is faster only for them.
_TENSOR_CORE_GROUP = 4
#: Size of the buffer that FlashInfer's wrappers use for the integers of a plan.
_PLAN_BYTES = 8 << 20
#: Minimum number of requests for the cascade wrapper. For fewer requests, merging the results costs more time than
#: reading the shared prefix only once saves.
_MIN_CASCADE_REQUESTS = 2


class Fence(Protocol):
    """A point in the device's queue of work that the host can wait for."""

    def wait(self) -> None:
        """Wait until the device has reached the last recorded point; return immediately if none was recorded."""
        ...

    def record(self) -> None:
        """Record the current end of the device's queue."""
        ...


class CudaFence:
    """A fence in the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait for the event.

        In the engine, the event is complete already, because step n is committed before step n + 2 is planned.
        """
        self._event.synchronize()

    def record(self) -> None:
        """Record the event."""
        self._event.record()


class NoFence:
    """A fence for devices that execute synchronously, such as the CPU."""

    def wait(self) -> None:
        """Do nothing."""

    def record(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The fields of `AttentionLayer` that a plan depends on; layers with equal fields share a plan."""

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
    """Tokens of a batch that one wrapper computes.

    A step has a part for its decodes, for its chunks, or for each level of a cascade.

    Attributes:
        tokens: range of the n tokens in the batch.
        attend: attend(q, (keys, values), out) writes the result, [n, H, D], to `out`.
    """

    tokens: slice
    attend: Callable[[Tensor, tuple[Tensor, Tensor], Tensor], None]


@dataclass(slots=True)
class _Fenced:
    """A wrapper with its fence. The fence delays a new plan until the device has copied the previous one."""

    wrapper: PagedWrapper
    fence: Fence

    def plan(self, *arguments: Any, **settings: Any) -> None:
        self.fence.wait()
        self.wrapper.plan(*arguments, **settings)
        self.fence.record()


@dataclass(slots=True)
class _GraphBuffers:
    """Buffers that the wrappers of all graph sizes share. Each graph is planned immediately before its replay.

    Attributes:
        indices: int32, page ids; has room for the largest batch.
        plan: uint8, the integers of a plan.
        wrappers: number of requests in the graph -> wrapper.
    """

    indices: Tensor
    plan: Tensor
    wrappers: dict[int, _Fenced] = field(default_factory=dict)


class LayerPlanner:
    """Chooses and plans the wrappers of a step, for layers of one kind.

    The decode wrapper computes one-token requests; the prefill wrapper computes all other requests. If all requests of
    a batch start with the same pages, the cascade wrapper computes the batch: it reads the shared pages once for all
    queries, and merges the result with that of the other pages. For a batch that a graph replays, the planner uses the
    decode wrapper that was captured with that batch size.

    Args:
        kind: the kind of the layers.
        library: constructors of the wrappers.
        workspace: uint8, buffer for partial results; wrappers that run one after the other may share it.
        page_size: number of tokens in a page.
        dtype: dtype of queries, keys and values.
        options: see `FlashInferOptions`.
        make_fence: creates a fence; called once per wrapper.
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
        """Plan a step. Return parts that cover the batch's tokens in order."""
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
        """Return the number of shared pages to read once for all requests; 0 if the cascade wrapper is not used."""
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
            causal=True,  # masks only pages that are not shared: shared pages come before all queries
            **self._settings,
        )
        return Part(slice(0, batch.num_tokens), _copied(fenced.wrapper))

    def _pages(self, batch: ForwardBatch, requests: slice) -> RaggedPages:
        return ragged_pages(batch, requests, self._page_size, self._kind.sliding_window)

    def _token_ends(self, batch: ForwardBatch, first: int) -> Tensor:
        """Return 0 and the cumulative query lengths of the requests from `first` on: int32 [n + 1], on the host."""
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
        """Return the wrapper whose buffers the graph of this batch size reads; create it at first use."""
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
    """Return `Part.attend` for a wrapper whose `run` has an `out` argument."""

    def attend(q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        wrapper.run(q, kv, out=out)

    return attend


def _copied(wrapper: PagedWrapper) -> Callable[[Tensor, tuple[Tensor, Tensor], Tensor], None]:
    """Return `Part.attend` for a wrapper whose `run` allocates its result."""

    def attend(q: Tensor, kv: tuple[Tensor, Tensor], out: Tensor) -> None:
        out.copy_(wrapper.run(q, kv))

    return attend
