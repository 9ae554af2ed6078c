"""The contract of an attention backend: write keys and values into pages, attend over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from graftlm.contracts.batch import ForwardBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AttentionBackend", "AttentionCapabilities", "AttentionContext", "AttentionLayer", "KVCache"]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The shape of one attention layer.

    Attributes:
        layer_id: index into the KV cache.
        num_heads: query heads H.
        num_kv_heads: key/value heads H_kv; H is a multiple of it.
        head_dim: D.
        scale: multiplies the scores.
        sliding_window: a token sees itself and this many - 1 tokens before it; None sees all.
        soft_cap: c replaces scores s by c * tanh(s / c); None leaves them.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


class KVCache(Protocol):
    """The paged tensors a backend reads and writes; a layer's do not move while the engine lives."""

    def keys(self, layer_id: int) -> Tensor:
        """Return a layer's keys, [num_pages, page_size, H_kv, D], contiguous."""
        ...

    def values(self, layer_id: int) -> Tensor:
        """Return a layer's values, [num_pages, page_size, H_kv, D], contiguous."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What core may ask of a backend. `None` means any.

    Attributes:
        devices: torch device types.
        dtypes: names such as "float32", "bfloat16".
        head_dims: supported D.
        page_sizes: supported page sizes.
        sliding_window, soft_cap, cascade: whether layers may ask for them.
        graph: whether a one-token batch may be captured in a CUDA graph. `prepare` is called before the capture and
            before every replay, with batches of one size in the same tensors; the page table has the columns that the
            longest context needs, and what `forward` launches must depend on nothing but that.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    sliding_window: bool = True
    soft_cap: bool = True
    cascade: bool = False
    graph: bool = False


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a backend is created with.

    Attributes:
        layers: every attention layer of the model, by layer_id.
        kv: the paged cache.
        page_size: tokens in a page.
        device, dtype: of queries, keys and values.
        max_requests: B is never larger.
        max_context_len: seq_lens are never larger.
    """

    layers: Sequence[AttentionLayer]
    kv: KVCache
    page_size: int
    device: torch.device
    dtype: torch.dtype
    max_requests: int
    max_context_len: int


class AttentionBackend(ABC):
    """Attention over a paged cache.

    Invariants, each checked by `graftlm.testing.AttentionBackendConformance`:
        - `forward` first writes all keys and values of the batch at `out_slots`, then attends: a request sees tokens
          that another request of the batch has just written.
        - A query at position p attends to positions max(0, p - window + 1) .. p of its own request, through its page
          table, and to nothing else; what stands in other slots, NaN included, never matters.
        - Any mix of one-token and many-token requests is allowed, and gives each request what it gets alone.
        - Neither inputs nor slots outside `out_slots` are changed.
    """

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Compute, once a step, what every layer's `forward` needs. The batch stays valid until the next `prepare`."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write the batch's keys and values, attend, and return the mixed values.

        Args:
            q: [T, H, D], rotated; the last dimension is contiguous.
            k, v: [T, H_kv, D], likewise.
            layer: which layer, one of the context's.

        Returns: [T, H * D], q's dtype, contiguous.
        """
