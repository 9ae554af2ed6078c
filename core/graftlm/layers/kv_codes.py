"""Keys and values in 8 bits: how a row becomes codes, and codes become a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from graftlm.contracts import KVCache

__all__ = ["KV_DTYPES", "SCALE_DTYPE", "CacheRows", "cache_rows", "encode_int8"]

#: What `memory.kv_dtype` and `AttentionCapabilities.kv_dtypes` call them. Only rows of int8 have scales.
KV_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
#: Of the scales of int8 rows: it has float32's range, and rounding a scale costs nothing, for it is rounded first.
SCALE_DTYPE = torch.bfloat16

_INT8_MAX = 127
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class CacheRows:
    """A layer's keys or values by slot, in whatever dtype the cache holds them.

    Attributes:
        stored: [slots, H_kv, D], the cache's memory.
        scales: [slots, H_kv] SCALE_DTYPE, where `stored` is int8 codes: a row is its codes times its scale. Else None.
    """

    stored: Tensor
    scales: Tensor | None

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows [T, H_kv, D] into slots, int64 [T], as the cache holds them."""
        if self.scales is not None:
            codes, scales = encode_int8(rows)
            self.stored.index_copy_(0, slots, codes)
            self.scales.index_copy_(0, slots, scales)
        elif self.stored.dtype == torch.float8_e4m3fn:
            codes = rows.float().clamp(-_FP8_MAX, _FP8_MAX).to(self.stored.dtype)
            self.stored.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
        else:
            self.stored.index_copy_(0, slots, rows.to(self.stored.dtype))

    def read(self, slots: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of slots, [S, H_kv, D], as numbers of a dtype; a view where nothing has to be converted."""
        if self.scales is not None:
            return (self.stored[slots] * self.scales[slots].float().unsqueeze(-1)).to(dtype)
        if self.stored.dtype == torch.float8_e4m3fn:
            return self.stored.view(torch.uint8)[slots].view(self.stored.dtype).to(dtype)
        return self.stored[slots].to(dtype)


def cache_rows(kv: KVCache, layer_id: int) -> tuple[CacheRows, CacheRows]:
    """Return a layer's keys and values by slot. Where values are a prefix of the keys, writing keys writes both."""
    tensors = (kv.keys(layer_id), kv.key_scales(layer_id)), (kv.values(layer_id), kv.value_scales(layer_id))
    keys, values = (
        CacheRows(stored.flatten(0, 1), None if scales is None else scales.flatten(0, 1)) for stored, scales in tensors
    )
    return keys, values


def encode_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, int8 [..., D], and scales, SCALE_DTYPE [...], of rows [..., D] of any floating dtype.

    A row's scale is its largest magnitude / 127, rounded; a code is the number / the rounded scale, rounded half to
    even. A row with a NaN in it has a scale that is NaN, and is NaN when it is read; so is one with an infinity.
    """
    numbers = rows.float()
    scales = (numbers.abs().amax(dim=-1) / _INT8_MAX).to(SCALE_DTYPE)
    ratios = numbers / scales.float().unsqueeze(-1)
    codes = ratios.nan_to_num(nan=0.0).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return codes, scales
