"""The contract of an attention backend: write keys and values into pages, attend over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        value_prefix_dim: a token's value is this many first numbers of its key, and only keys are stored, as DeepSeek's
            latent attention has it; None: values are stored beside the keys, and have D numbers too.
        sinks: [H], a parameter of the model: a query of head h gives sinks[h] a part of its softmax, as if it were one
            more score, whose value is zero; None adds none. Its numbers may change between steps, its address may not.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    value_prefix_dim: int | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def value_dim(self) -> int:
        """Numbers of one head's value, D_v."""
        return self.head_dim if self.value_prefix_dim is None else self.value_prefix_dim

    @property
    def numbers_per_token(self) -> int:
        """Numbers that the KV cache stores for a token of this layer."""
        return self.num_kv_heads * (2 * self.head_dim if self.value_prefix_dim is None else self.head_dim)


class KVCache(Protocol):
    """The paged tensors a backend reads and writes; a layer's do not move while the engine lives.

    They hold keys and values in the model's dtype, or in one of the `kv_dtypes` that the backend claims:

        int8    a token's D numbers of a head are codes, times a scale that stands beside: `key_scales`, `value_scales`.
                The scale is the largest magnitude / 127 in bfloat16, a code the number / that scale, half to even.
        fp8     float8_e4m3fn, no scales; what is larger than 448 becomes 448.

    `graftlm.layers.CacheRows` reads and writes both.
    """

    def keys(self, layer_id: int) -> Tensor:
        """Return a layer's keys, [num_pages, page_size, H_kv, D], contiguous."""
        ...

    def values(self, layer_id: int) -> Tensor:
        """Return a layer's values, [num_pages, page_size, H_kv, D], contiguous.

        Where the layer's values are a prefix of its keys: a view of `keys`, [num_pages, page_size, H_kv, D_v].
        """
        ...

    def key_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of a layer's int8 keys, bfloat16 [num_pages, page_size, H_kv]; None for other dtypes."""
        ...

    def value_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of a layer's values, likewise; the keys', where values are a prefix of them."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """What core may ask of a backend. `None` means any.

    Attributes:
        devices: torch device types.
        dtypes: names such as "float32", "bfloat16".
        head_dims: supported D.
        page_sizes: supported page sizes.
        kv_dtypes: what the cache may hold besides the model's dtype: "int8", "fp8"; see `KVCache`.
        sliding_window, soft_cap, value_prefix, sinks, cascade: whether layers may ask for them.
        graph: whether a one-token batch may be captured in a CUDA graph. `prepare` is called before the capture and
            before every replay, with batches of one size in the same tensors; the page table has the columns that the
            longest context needs, and what `forward` launches must depend on nothing but that.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    kv_dtypes: tuple[str, ...] = ()
    sliding_window: bool = True
    soft_cap: bool = True
    value_prefix: bool = False
    sinks: bool = False
    cascade: bool = False
    graph: bool = False


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What a backend is created with.

    Attributes:
        layers: every attention layer of the model, by layer_id.
        kv: the paged cache.
        page_size: tokens in a page.
        device, dtype: of the queries, keys and values that `forward` is given; the cache may hold 8 bits.
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

    @property
    def repeats_calls(self) -> bool:
        """Whether `forward` does the same for all batches of as many one-token requests, on a CPU.

        It then calls compiled kernels through `graftlm.layers.call_native`, and `prepare` puts what is different about
        a batch where those calls find it. See `Model.repeats_calls`.
        """
        return False

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write the batch's keys and values, attend, and return the mixed values.

        Args:
            q: [T, H, D], rotated; the last dimension is contiguous.
            k: [T, H_kv, D], likewise.
            v: [T, H_kv, D_v], likewise; where values are a prefix of the keys, that part of k, not to be written again.
            layer: which layer, one of the context's.

        Returns: [T, H * D_v], q's dtype, contiguous.
        """
