"""The paged key and value tensors of every attention layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graftlm.contracts import AttentionLayer
from graftlm.execution.released_tensors import ReleasedTensors
from graftlm.execution.state_store import StateStore
from graftlm.layers.kv_codes import SCALE_DTYPE

__all__ = ["KVStore"]


class KVStore:
    """The tensors of keys and values, [pages, page_size, H_kv, D] per layer, contiguous; implements `KVCache`.

    A layer whose values are a prefix of its keys has one tensor instead of two:

        keys     [pages, page_size, H_kv, D]      c0 c1 ... c511 | r0 ... r63
        values   [pages, page_size, H_kv, D_v]    c0 c1 ... c511

    With int8, each token has one scale per head for its keys and one per head for its values, in separate tensors:

        keys     [pages, page_size, H_kv, D]      k0 k1 ... k127       key_scales    [pages, page_size, H_kv]
        values   [pages, page_size, H_kv, D]      v0 v1 ... v127       value_scales  [pages, page_size, H_kv]

    The memory is allocated without initialization. On a CPU, the operating system allocates RAM at the first write, so
    slots that were never written take no RAM. Their content is undefined.

    Args:
        layers: every attention layer, in order of layer_id.
        num_pages: number of pages per layer.
        page_size: number of tokens in a page.
        dtype: dtype of the stored keys and values: the model's dtype, torch.int8 or torch.float8_e4m3fn.
        device: device of all tensors.
        num_window_pages: number of pages per layer with a sliding window; None: `num_pages`.
        spare_pages: number of additional pages per layer that no request owns.
        states: the recurrent states, whose memory is released and restored together with the pages; None if the model
            has no such states.

    Attributes:
        has_window_memory: whether layers with a sliding window have their own pages.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_window_pages: int | None = None,
        spare_pages: int = 0,
        states: StateStore | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.states = states
        self.has_window_memory = num_window_pages is not None
        self.num_window_pages = num_pages if num_window_pages is None else num_window_pages
        shapes = [
            (self._pages_of(layer) + spare_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in layers
        ]
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [
            torch.empty_like(keys) if layer.value_prefix_dim is None else keys[..., : layer.value_prefix_dim]
            for layer, keys in zip(layers, self._keys, strict=True)
        ]
        self._key_scales = [_empty_scales(keys) for keys in self._keys]
        self._value_scales = [
            _empty_scales(keys) if layer.value_prefix_dim is None else scales
            for layer, keys, scales in zip(layers, self._keys, self._key_scales, strict=True)
        ]
        self._stored = [self._distinct(layer) for layer in layers]
        self._released: ReleasedTensors | None = None

    def _pages_of(self, layer: AttentionLayer) -> int:
        return self.num_pages if layer.sliding_window is None else self.num_window_pages

    def _distinct(self, layer: AttentionLayer) -> tuple[Tensor, ...]:
        i = layer.layer_id
        tensors = [self._keys[i], self._values[i], self._key_scales[i], self._value_scales[i]]
        if layer.value_prefix_dim is not None:
            tensors = [self._keys[i], self._key_scales[i]]
        return tuple(tensor for tensor in tensors if tensor is not None)

    @staticmethod
    def bytes_per_token(layers: Sequence[AttentionLayer], dtype: torch.dtype) -> int:
        """Return the number of bytes of one token's keys, values and scales in all layers."""
        row_scale = SCALE_DTYPE.itemsize if dtype == torch.int8 else 0
        return sum(
            layer.numbers_per_token // layer.head_dim * (layer.head_dim * dtype.itemsize + row_scale)
            for layer in layers
        )

    @property
    def num_layers(self) -> int:
        """Number of attention layers."""
        return len(self._keys)

    @property
    def page_bytes(self) -> int:
        """Number of bytes of one page's keys, values and scales in all layers."""
        return sum(tensor[0].nbytes for tensors in self._stored for tensor in tensors)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all keys, values and scales."""
        return sum(tensor.nbytes for tensors in self._stored for tensor in tensors)

    @property
    def is_released(self) -> bool:
        """Whether the tensors have no memory: `release` was called, and `restore` was not."""
        return self._released is not None

    def release(self) -> None:
        """Release the memory of all tensors until `restore`. No step may run in the meantime."""
        if self._released is None:
            self._released = ReleasedTensors(tensor for tensors in self._stored for tensor in tensors)
            if self.states is not None:
                self.states.release()

    def restore(self) -> bool:
        """Allocate the memory again, uninitialized; return whether the tensors have other addresses now.

        Raises:
            RuntimeError: the device has too little free memory; the memory stays released.
        """
        if self._released is None:
            return False
        self._released.restore()
        if self.states is not None:
            self.states.restore()
        changed, self._released = self._released.changes_addresses, None
        return changed

    def keys(self, layer_id: int) -> Tensor:
        """Return the tensor of a layer's keys, [pages, page_size, H_kv, D]; it is not a copy."""
        return self._keys[layer_id]

    def values(self, layer_id: int) -> Tensor:
        """Return the tensor of a layer's values, [pages, page_size, H_kv, D_v]; it may be a view of the keys."""
        return self._values[layer_id]

    def key_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of a layer's keys, bfloat16 [pages, page_size, H_kv]; None unless they are int8."""
        return self._key_scales[layer_id]

    def value_scales(self, layer_id: int) -> Tensor | None:
        """Return the scales of a layer's values; None unless they are int8.

        If values are a prefix of the keys, these are the keys' scales.
        """
        return self._value_scales[layer_id]

    def stored(self, layer_id: int) -> tuple[Tensor, ...]:
        """Return a layer's contiguous tensors, each once: keys, and separate values and scales if there are any."""
        return self._stored[layer_id]


def _empty_scales(rows: Tensor) -> Tensor | None:
    """Return an uninitialized tensor of scales for rows [pages, page_size, H_kv, D]; None if the dtype has none."""
    if rows.dtype != torch.int8:
        return None
    return torch.empty(rows.shape[:-1], dtype=SCALE_DTYPE, device=rows.device)
