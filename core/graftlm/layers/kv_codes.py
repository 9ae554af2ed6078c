"""Encodes rows of keys and values in 8 bits, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from graftlm.contracts import KVCache

__all__ = ["KV_DTYPES", "SCALE_DTYPE", "CacheRows", "cache_rows", "encode_int8"]

#: Names in `memory.kv_dtype` and `AttentionCapabilities.kv_dtypes` -> dtype of the cache. Only int8 rows have scales.
KV_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"int8": torch.int8, "fp8": torch.float8_e4m3fn})
#: Dtype of the scales of int8 rows. The dtype has float32's range. Codes are computed with the rounded scale.
SCALE_DTYPE = torch.bfloat16

_INT8_MAX = 127
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class CacheRows:
    """One layer's keys or values by slot, in the cache's dtype.

    Attributes:
        stored: [slots, H_kv, D], the cache's memory.
        scales: [slots, H_kv] SCALE_DTYPE if `stored` has int8 codes, else None. A row is its codes times its scale.
    """

    stored: Tensor
    scales: Tensor | None

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Encode rows [T, H_kv, D] and write them to slots, int64 [T]."""
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
        """Return the rows of slots, [S, H_kv, D], in a dtype; a view if no conversion is needed."""
        if self.scales is not None:
            return (self.stored[slots] * self.scales[slots].float().unsqueeze(-1)).to(dtype)
        if self.stored.dtype == torch.float8_e4m3fn:
            return self.stored.view(torch.uint8)[slots].view(self.stored.dtype).to(dtype)
        return self.stored[slots].to(dtype)


def cache_rows(kv: KVCache, layer_id: int) -> tuple[CacheRows, CacheRows]:
    """Return a layer's keys and values by slot. If values are a prefix of the keys, writing keys writes both."""
    tensors = (kv.keys(layer_id), kv.key_scales(layer_id)), (kv.values(layer_id), kv.value_scales(layer_id))
    keys, values = (
        CacheRows(stored.flatten(0, 1), None if scales is None else scales.flatten(0, 1)) for stored, scales in tensors
    )
    return keys, values


def encode_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, int8 [..., D], and scales, SCALE_DTYPE [...], of rows [..., D] of any floating dtype.

    A row's scale is its largest magnitude / 127, rounded. A code is the number / the rounded scale, rounded half to
    even. A row that contains NaN or an infinity has the scale NaN, and reads as NaN.
    """
    numbers = rows.float()
    scales = (numbers.abs().amax(dim=-1) / _INT8_MAX).to(SCALE_DTYPE)
    ratios = numbers / scales.float().unsqueeze(-1)
    codes = ratios.nan_to_num(nan=0.0).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    return codes, scales
