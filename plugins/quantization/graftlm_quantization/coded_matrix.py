"""Encodes weight matrices as small integers with a scale per group of inputs, in the kernel's reading order."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BLOCK_ROWS", "INPUTS_MULTIPLE", "CodedMatrix", "encode"]

#: Number of rows in a block; the last block is padded.
BLOCK_ROWS = 32
_LANES = 16  # rows in a vector; a block has two vectors of rows
#: Number of inputs whose codes are stored together. The number of inputs of a row must be a multiple of it.
INPUTS_MULTIPLE = 8
_PANEL_ROWS = 1024  # rows that are encoded together; this limits the memory for intermediate values
_FOUR_BIT_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # bit shift of input i, 0 to 7; even inputs are in a word's low half
# Permutation of eight dimensions: three leading dimensions, 16 rows as [4, 4], and 8 inputs as [2, 2, 2].
_EIGHT_BIT_ORDER = (0, 1, 2, 5, 3, 6, 4, 7)
_EIGHT_BIT_ORDER_BACK = (0, 1, 2, 4, 6, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A quantized matrix: W = scale * code + offset, with codes from -8 to 7 or from -127 to 127.

    Attributes:
        out_features: N, number of rows.
        in_features: K, number of columns, a multiple of 8.
        bits: bits of a code, 4 or 8.
        group_size: number of consecutive inputs of a row that share a scale; divides K.
        codes: uint8 [N / 32, K / 8, 2, bytes]: for each half block of 16 rows, the codes of 8 inputs. With 4 bits, a
            row's codes are a 32-bit word; see `_FOUR_BIT_SHIFTS`. With 8 bits, a code has sign and magnitude. The codes
            are in an order in which one instruction looks up two vectors; see `_EIGHT_BIT_ORDER`.
        scales: scale and offset of each row and group, bfloat16 [N / 32, K / group_size, 32, 2].
    """

    out_features: int
    in_features: int
    bits: int
    group_size: int
    codes: Tensor
    scales: Tensor

    @property
    def num_blocks(self) -> int:
        """Number of blocks of 32 rows, including a padded block."""
        return self.codes.shape[0]

    @property
    def num_bytes(self) -> int:
        """Size of codes and scales in bytes."""
        return self.codes.nbytes + self.scales.nbytes

    def decoded(self, first_block: int, end_block: int) -> Tensor:
        """Return the weights of blocks `first_block` to `end_block` - 1: float32 [rows, K], without the padding."""
        codes = _unpack(self.codes[first_block:end_block], self.bits)  # [B, 32, K]
        scale, offset = self.scales[first_block:end_block].float().transpose(1, 2).unbind(-1)  # [B, 32, groups]
        grouped = codes.view(*scale.shape, self.group_size).float()
        weights = (grouped * scale[..., None] + offset[..., None]).flatten(2).flatten(0, 1)
        return weights[: self.out_features - first_block * BLOCK_ROWS]


def encode(weight: Tensor, bits: int, group_size: int) -> CodedMatrix:
    """Quantize a matrix, group by group.

    4-bit codes range from a group's smallest to its largest weight. 8-bit codes are symmetric around 0.

    Args:
        weight: [N, K] of a floating dtype, on the CPU; K is a multiple of 8 and of `group_size`.
        bits: 4 or 8.
        group_size: number of inputs that share a scale.
    """
    panels = [_encode_panel(panel, bits, group_size) for panel in torch.split(weight.detach(), _PANEL_ROWS)]
    codes, scales = (torch.cat(parts) for parts in zip(*panels, strict=True))
    return CodedMatrix(weight.shape[0], weight.shape[1], bits, group_size, codes, scales)


def _encode_panel(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of some rows. Only the last panel is padded to whole blocks."""
    padding = -weight.shape[0] % BLOCK_ROWS
    rows = torch.nn.functional.pad(weight.float(), (0, 0, 0, padding))
    groups = rows.view(rows.shape[0], -1, group_size)  # [rows, groups, group_size]
    scale, offset = _asymmetric_scales(groups) if bits == 4 else _symmetric_scales(groups)
    step = torch.where(scale > 0, scale, 1.0)  # in a group of equal weights, scale is 0 and all weights are the offset
    limit = (-8, 7) if bits == 4 else (-127, 127)
    codes = ((groups - offset[..., None]) / step[..., None]).round_().clamp_(*limit).to(torch.int32).flatten(1)
    blocks = torch.stack((scale, offset), -1).bfloat16().view(-1, BLOCK_ROWS, groups.shape[1], 2)
    return _pack(codes, bits), blocks.transpose(1, 2).contiguous()


def _asymmetric_scales(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the offset of each group, with which 16 codes span the range of the group's weights.

    Args:
        groups: float32 [rows, groups, group_size].

    Returns: float32 [rows, groups] each.
    """
    smallest, largest = groups.aminmax(dim=-1)
    scale = _rounded_up((largest - smallest) / 15)
    return scale, (smallest + 8 * scale).bfloat16().float()


def _symmetric_scales(groups: Tensor) -> tuple[Tensor, Tensor]:
    scale = _rounded_up(groups.abs().amax(dim=-1) / 127)
    return scale, torch.zeros_like(scale)


def _rounded_up(scale: Tensor) -> Tensor:
    """Round scales up to bfloat16 values, so that no weight is outside the range of the codes."""
    return ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int32 codes [rows, K] in the layout of `CodedMatrix.codes`."""
    # [B, 2, 16, K / 8, 8] -> [B, K / 8, 2, 16, 8]
    steps = codes.view(-1, 2, _LANES, codes.shape[1] // INPUTS_MULTIPLE, INPUTS_MULTIPLE).permute(0, 3, 1, 2, 4)
    if bits == 8:
        signed = steps.abs() + 128 * (steps < 0)
        return signed.to(torch.uint8).reshape(*signed.shape[:3], 4, 4, 2, 2, 2).permute(_EIGHT_BIT_ORDER).flatten(3)
    shifts = torch.tensor(_FOUR_BIT_SHIFTS, dtype=torch.int32)
    words = ((steps + 8) << shifts).sum(-1, dtype=torch.int32)  # the fields do not overlap, so their sum is their union
    return words.view(torch.uint8)


def _unpack(codes: Tensor, bits: int) -> Tensor:
    """Reverse `_pack`. Returns the codes, int32 (4 bits) or int8 (8 bits), [B, 32, K]."""
    if bits == 8:
        magnitudes = (codes & 127).to(torch.int8)
        signed = torch.where(codes > 127, -magnitudes, magnitudes).view(*codes.shape[:3], 2, 4, 2, 4, 2)
        steps = signed.permute(_EIGHT_BIT_ORDER_BACK).flatten(5).flatten(3, 4)
    else:
        shifts = torch.tensor(_FOUR_BIT_SHIFTS, dtype=torch.int32)
        steps = ((codes.view(torch.int32)[..., None] >> shifts) & 15) - 8  # [B, K / 8, 2, 16, 8]
    return steps.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2)
