"""Decodes MXFP4 weights (OCP Microscaling Formats 1.0), the format of GPT-OSS's experts, while they are loaded.

A block has 32 consecutive numbers of a row. It consists of 16 bytes and one exponent. Each byte has two four-bit
numbers, the first in the low bits. bfloat16 represents every product of a number and 2 to the exponent exactly.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from graftlm.errors import WeightError

__all__ = ["dequantize_mxfp4", "plain_weights"]

_BLOCKS, _SCALES = "_blocks", "_scales"
_EXPONENT_BIAS = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plain_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Replace each pair of `{name}_blocks` and `{name}_scales` by `{name}`. Other tensors are not changed.

    Args:
        weights: (name, tensor) of a checkpoint, in any order.

    Yields: (name, tensor); a decoded pair is bfloat16 [E, in, out].

    Raises:
        WeightError: one tensor of a pair is missing, or the shapes of a pair are inconsistent.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights:
        partner = _partner(name)
        if partner is None:
            yield name, tensor
        elif partner not in waiting:
            waiting[name] = tensor
        else:
            other = waiting.pop(partner)
            blocks, scales = (tensor, other) if name.endswith(_BLOCKS) else (other, tensor)
            plain = name.removesuffix(_BLOCKS).removesuffix(_SCALES)
            yield plain, dequantize_mxfp4(blocks, scales, plain).transpose(1, 2)
    if waiting:
        name = min(waiting)
        raise WeightError(f"The checkpoint has {name!r}, but not {_partner(name)!r}")


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """Decode blocks.

    Args:
        blocks: uint8 [E, out, in / 32, 16].
        scales: uint8 [E, out, in / 32], exponents of 2 with a bias of 127.
        name: name of the tensor, for the error.

    Returns: bfloat16 [E, out, in].

    Raises:
        WeightError: the tensors have other shapes or dtypes.
    """
    fits = blocks.dim() == 4 and blocks.shape[:-1] == scales.shape and blocks.shape[-1] == 16
    if not fits or blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
        raise WeightError(
            f"The checkpoint's {name!r} is not MXFP4: blocks are {blocks.dtype} {list(blocks.shape)}, scales "
            f"{scales.dtype} {list(scales.shape)}; expected uint8 [E, out, in / 32, 16] and uint8 [E, out, in / 32]"
        )
    out = torch.empty(*blocks.shape[:2], blocks.shape[2] * 32, dtype=torch.bfloat16, device=blocks.device)
    pairs = _number_pairs(blocks.device)
    for expert, target in enumerate(out):  # one expert at a time, to limit the memory of the look-up
        numbers = pairs[blocks[expert].int()].flatten(-2)  # [out, in / 32, 32]
        exponents = scales[expert].int() - _EXPONENT_BIAS
        target.copy_(torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2))
    return out


def _number_pairs(device: torch.device) -> Tensor:
    """Return the numbers of the low and the high four bits of each byte, float32 [256, 2]."""
    numbers = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=-1)


def _partner(name: str) -> str | None:
    """Return the name of the other tensor of a pair; None if the tensor is not part of a pair."""
    if name.endswith(_BLOCKS):
        return name.removesuffix(_BLOCKS) + _SCALES
    return name.removesuffix(_SCALES) + _BLOCKS if name.endswith(_SCALES) else None
