"""Applies scales per tensor, per output, per group of inputs or per block, distinguished by their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm.checkpoint.quantized.coded_weight import CodedWeight, consecutive_groups

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_grid", "scaled_codes"]


def scaled_codes(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, block: tuple[int, int] | None = None
) -> CodedWeight:
    """Return the weight of codes that need no unpacking.

    Args:
        codes: [N, K], one byte each.
        scales: one number; or one per output, [N] or [N, 1]; or one per group of inputs, [N, G]; or one per block.
        zeros: zero points with the shape of the scales; None: 0.
        block: numbers of outputs and inputs of a block; the scales are then [ceil(N / outputs), ceil(K / inputs)].

    Raises:
        ValueError: the shapes do not match.
    """
    if codes.dim() != 2:
        raise ValueError(f"the weight must be a matrix, got {list(codes.shape)}")
    if block is None or scales.numel() == 1:
        return CodedWeight(codes, as_grid(scales), None if zeros is None else as_grid(zeros))
    (num_outputs, num_inputs), (outputs, inputs) = codes.shape, block
    expected = [-(-num_outputs // outputs), -(-num_inputs // inputs)]
    if list(scales.shape) != expected or zeros is not None:
        raise ValueError(f"blocks of {outputs} x {inputs} need scales of {expected} and no zeros")
    # A block may be larger than the weight, so the repeats are limited to the number of outputs.
    by_output = scales.repeat_interleave(min(outputs, num_outputs), dim=0)[:num_outputs]
    return CodedWeight(codes, by_output, groups=consecutive_groups(num_inputs, inputs))


def as_grid(values: Tensor) -> Tensor:
    """Return scales or zero points as a matrix: one row per output (or one row for all) and one column per group."""
    if values.numel() == 1:
        return values.reshape(1, 1)
    return values[:, None] if values.dim() == 1 else values
