"""A quantized weight of codes, scales and zero points, and the unpacking of codes from 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CodedWeight", "consecutive_groups", "unpack"]

#: Number of weights that are decoded at a time, which limits the memory for temporary float32 values.
_PANEL_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """The weight scales[n, g] * (codes[n, k] - zeros[n, g]) of N outputs and K inputs; g is the group of input k.

    Attributes:
        codes: [N, K], integers or float8, one byte each.
        scales: [N, G] or [1, G], of a floating dtype; finite.
        zeros: same shape as the scales, any dtype; None: 0.
        groups: int64 [K], the group of each input; None: G groups of K / G consecutive inputs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        if self.codes.dim() != 2 or self.codes.element_size() != 1:
            raise ValueError(f"codes must be a matrix of bytes, got {list(self.codes.shape)} of {self.codes.dtype}")
        num_outputs, num_inputs = self.codes.shape
        if not self.codes.numel():
            raise ValueError(f"a weight must have outputs and inputs, got {num_outputs} and {num_inputs}")
        if self.scales.dim() != 2 or self.scales.shape[0] not in (1, num_outputs):
            raise ValueError(f"scales must have 1 or {num_outputs} rows, got {list(self.scales.shape)}")
        num_groups = self.scales.shape[1]
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            raise ValueError(
                f"zeros must have the scales' shape {list(self.scales.shape)}, got {list(self.zeros.shape)}"
            )
        if self.groups is None and (num_groups == 0 or num_inputs % num_groups):
            raise ValueError(f"{num_inputs} inputs cannot be divided into {num_groups} groups")
        if self.groups is not None and not _are_groups(self.groups, num_inputs, num_groups):
            raise ValueError(f"each of {num_inputs} inputs must have one of {num_groups} groups")
        if not self.scales.is_floating_point() or not self.scales.float().isfinite().all():
            raise ValueError("scales must be finite numbers of a floating dtype")  # 0 is allowed, for rows of zeros

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, [N, K], computed in float32 and rounded once."""
        import torch

        weight = torch.empty(self.codes.shape, dtype=dtype)
        num_outputs, num_inputs = self.codes.shape
        num_rows = max(1, _PANEL_WEIGHTS // max(1, num_inputs))
        for first in range(0, num_outputs, num_rows):
            weight[first : first + num_rows] = self._panel(slice(first, first + num_rows))
        return weight

    def _panel(self, rows: slice) -> Tensor:
        """Return some rows in float32."""
        numbers = self.codes[rows].contiguous().float()  # a copy, because codes are bytes
        scales = self._by_input(self.scales, rows)
        grouped = numbers.view(numbers.shape[0], scales.shape[1], -1)
        if self.zeros is not None:
            grouped -= self._by_input(self.zeros, rows)
        grouped *= scales
        return numbers

    def _by_input(self, values: Tensor, rows: slice) -> Tensor:
        """Return the values of some rows, float32 [rows, G, 1], or [rows, K, 1] if groups are not consecutive."""
        chosen = values.expand(self.codes.shape[0], -1)[rows].float()
        return (chosen if self.groups is None else chosen[:, self.groups])[..., None]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in 32-bit words; the first number is in the lowest bits.

    Args:
        words: int32 [R, W].
        bits: number of bits of a number: 2, 4 or 8.

    Returns: uint8 [R, W * 32 / bits].

    Raises:
        ValueError: the words have another shape or dtype.
    """
    import torch

    if words.dim() != 2 or words.dtype != torch.int32 or not words.numel():
        raise ValueError(
            f"packed numbers must be a non-empty matrix of int32, got {list(words.shape)} of {words.dtype}"
        )
    packed = words.contiguous().view(torch.uint8)  # little-endian, as in safetensors
    if bits == 8:
        return packed
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    numbers: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)  # [R, bytes, 8 / bits]
    return numbers.flatten(1)


def consecutive_groups(num_inputs: int, group_size: int) -> Tensor | None:
    """Return the group of each input, int64 [K]; None if all groups are full; see `CodedWeight.groups`.

    If the group size is larger than the number of inputs, all inputs are one full group.
    """
    import torch

    group_size = max(1, min(group_size, num_inputs))  # the number in a file may exceed int64
    return torch.arange(num_inputs) // group_size if num_inputs % group_size else None


def _are_groups(groups: Tensor, num_inputs: int, num_groups: int) -> bool:
    if groups.shape != (num_inputs,):
        return False
    return bool(groups.min() >= 0 and groups.max() < num_groups)
