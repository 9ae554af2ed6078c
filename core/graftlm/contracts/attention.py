"""The contract of an attention backend, which writes keys and values into pages and attends over them."""

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
        num_heads: H, number of query heads.
        num_kv_heads: H_kv, number of key/value heads; H is a multiple of H_kv.
        head_dim: D, dimension of a head.
        scale: factor by which the scores are multiplied before the softmax.
        sliding_window: number of tokens that a token attends to, itself included; None: it attends to all tokens before
            it.
        soft_cap: the number c: each score s is replaced by c * tanh(s / c); None: scores are not changed.
        value_prefix_dim: D_v, the number of first elements of a token's key that are also its value, as in DeepSeek's
            latent attention; the cache then stores only keys. None: the cache stores keys and separate values of D
            numbers.
        sinks: [H], a parameter of the model. In head h, the softmax of each query has one additional score, sinks[h],
            whose value vector is zero. None: no additional score. The tensor's numbers may change between steps, but
            not its address.
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
        """D_v, the dimension of one head's values."""
        return self.head_dim if self.value_prefix_dim is None else self.value_prefix_dim

    @property
    def numbers_per_token(self) -> int:
        """Number of elements that the KV cache stores for one token in this layer."""
        return self.num_kv_heads * (2 * self.head_dim if self.value_prefix_dim is None else self.head_dim)


class KVCache(Protocol):
    """The paged tensors that a backend reads and writes. Their addresses do not change while the engine runs.

    Keys and values are stored in the model's dtype, or in one of the `kv_dtypes` of the backend's capabilities:

        int8    the D numbers of one token and head are codes with a common scale, in `key_scales` or `value_scales`.
                scale = largest magnitude / 127, in bfloat16; code = number / scale, rounded half to even.
        fp8     float8_e4m3fn without scales; magnitudes above 448 become 448.

    `graftlm.layers.CacheRows` reads and writes both formats.
    """

    def keys(self, layer_id: int) -> Tensor:
        """Return a layer's keys, [num_pages, page_size, H_kv, D], contiguous."""
        ...

    def values(self, layer_id: int) -> Tensor:
        """Return a layer's values, [num_pages, page_size, H_kv, D], contiguous.

        If the layer's values are a prefix of its keys, this is a view of `keys`, [num_pages, page_size, H_kv, D_v].
        """
        ...

    def key_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of a layer's int8 keys, bfloat16 [num_pages, page_size, H_kv]; None for other dtypes."""
        ...

    def value_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of int8 values, like `key_scales`; if values are a key prefix, return the keys' scales."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionCapabilities:
    """The features that an attention backend supports. In fields that may be None, None means all values.

    Attributes:
        devices: torch device types.
        dtypes: names such as "float32", "bfloat16".
        head_dims: supported head dimensions, D.
        page_sizes: supported page sizes.
        kv_dtypes: supported formats of the cache in addition to the model's dtype: "int8", "fp8"; see `KVCache`.
        sliding_window, soft_cap, value_prefix, sinks: whether layers may have this feature; see `AttentionLayer`.
        cascade: whether a prefix that all requests of a step share is read only once per step. Core does not read this
            field.
        graph: whether a decode batch may be captured in a CUDA graph. `prepare` is called before the capture and before
            every replay. For one batch size, all batches are in the same tensors, and the page table has the number of
            columns that the longest context needs. The kernels that `forward` launches must depend only on these sizes.
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
    """The arguments of a backend's `create`.

    Attributes:
        layers: all attention layers of the model, in order of layer_id.
        kv: the paged cache.
        page_size: number of tokens in a page.
        device, dtype: device and dtype of the queries, keys and values that `forward` gets; the cache may have another
            dtype.
        max_requests: upper limit of B.
        max_context_len: upper limit of each number in `seq_lens`, in tokens.
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
        - `forward` first writes all keys and values of the batch at `out_slots`, then attends. A request can therefore
          attend to tokens that another request of the same batch writes.
        - A query at position p attends only to positions max(0, p - window + 1) .. p of its own request, which the page
          table maps to slots. The content of other slots, including NaN, has no effect.
        - A batch may contain any mix of requests with one and with many tokens. A request's result does not depend on
          the other requests.
        - Inputs and slots outside `out_slots` are not changed.
    """

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Compute the data that `forward` reads in all layers of a step. The batch stays valid until the next call."""

    @property
    def repeats_calls(self) -> bool:
        """Whether `forward` on a CPU makes the same kernel calls for all batches without prefill of one token count.

        In such a batch, each request has one token, or several tokens if it has drafts.

        If True, `forward` calls compiled kernels through `graftlm.layers.call_native`, and `prepare` writes the data
        that differs between batches to the tensors that these kernels read. See `Model.repeats_calls`.
        """
        return False

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Write the batch's keys and values, attend, and return the weighted values.

        Args:
            q: [T, H, D], with rotary embedding applied; the last dimension is contiguous.
            k: [T, H_kv, D], with rotary embedding applied; the last dimension is contiguous.
            v: [T, H_kv, D_v]; the last dimension is contiguous. If values are a prefix of the keys, v is that part of k
                and is not written again.
            layer: one of the context's layers.

        Returns: [T, H * D_v], q's dtype, contiguous.
        """
