"""Reads weights of compressed-tensors (llm-compressor): packed or unpacked integers, or float8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from graftlm.checkpoint.quantized.coded_weight import CodedWeight, unpack
from graftlm.checkpoint.quantized.scale_grid import as_grid, scaled_codes
from graftlm.checkpoint.quantized.settings import read_block_size, read_object
from graftlm.checkpoint.quantized.weight_format import WeightFormat, WeightParts
from graftlm.errors import CheckpointError, UnsupportedArchitectureError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DECODED", "CompressedTensorsFormat"]

#: Formats of compressed-tensors that are decoded.
DECODED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_MIXED = "mixed-precision"  # each group of modules has its own format
_BITS = (4, 8, 2)


@dataclass(frozen=True)
class CompressedTensorsFormat(WeightFormat):
    """Packed or unpacked codes; scales and zero points per tensor, per output, per group or per block.

    For N outputs, K inputs, G groups, and p numbers per word. Packed: weight_packed int32 [N, K/p], weight_shape [2],
    weight_scale [N, G], weight_zero_point int32 [N/p, G], weight_g_idx int32 [K]. Not packed: weight int8 or float8
    [N, K], weight_scale, weight_zero_point int8.

    The tensors of a module determine whether and how it is quantized; the configuration has only patterns of module
    names and module classes.

    Attributes:
        names: names of the formats in the configuration, such as "pack-quantized".
        block: numbers of outputs and inputs of a block with one scale; None: no blocks.
    """

    names: tuple[str, ...]
    block: tuple[int, int] | None

    parts: ClassVar[Set[str]] = frozenset(
        ("weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
    )
    ignored: ClassVar[Set[str]] = frozenset(
        f"{what}_{kind}" for what in ("input", "output", "q", "k", "v") for kind in ("scale", "zero_point")
    )

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> CompressedTensorsFormat:
        """Read a quantization_config."""
        groups = list(_groups(settings))
        whole = settings.get("format")
        named = [group.get("format") if whole in (None, _MIXED) else whole for group in groups]
        names = tuple(dict.fromkeys(str(name) for name in named))  # empty if only keys and values are quantized
        _check_supported(settings, names)
        blocks = {read_block_size(read_object(group, "weights"), "block_structure") for group in groups} - {None}
        if len(blocks) > 1:
            raise UnsupportedArchitectureError(f"The checkpoint's weights have blocks of several sizes: {blocks}")
        return cls(names, blocks.pop() if blocks else None)

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return f"compressed-tensors, {' and '.join(self.names) or 'no weights'}"

    def main_part(self, parts: Set[str]) -> str | None:
        """Return "weight_packed" if the module has it, "weight" if the module has scales, else None."""
        if "weight_packed" in parts:
            return "weight_packed"
        return "weight" if "weight_scale" in parts else None

    def coded_weight(self, parts: WeightParts) -> CodedWeight:
        """Unpack packed codes and zero points."""
        if "weight_packed" in parts:
            return _packed(parts)
        return scaled_codes(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"), block=self.block)


def _groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError(
            f"quantization_config of compressed-tensors: config_groups must map names to settings, got {groups!r}"
        )
    yield from groups.values()


def _check_supported(settings: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in DECODED]
    sparsity = read_object(settings, "sparsity_config").get("format", "dense")
    if sparsity != "dense":
        unknown.append(str(sparsity))
    if read_object(settings, "transform_config").get("config_groups"):
        unknown.append("transform_config")  # rotates activations between layers
    if unknown:
        raise UnsupportedArchitectureError(
            f"The checkpoint is quantized by compressed-tensors with {unknown[0]!r}, which is not supported (supported "
            f"are {', '.join(DECODED)}). Use the plain checkpoint, with model.quantization to save memory"
        )


def _packed(parts: WeightParts) -> CodedWeight:
    num_outputs, num_inputs = _shape(parts["weight_shape"])
    words, scales, order = parts["weight_packed"], as_grid(parts["weight_scale"]), parts.get("weight_g_idx")
    if len(parts.matrix("weight_packed")) != num_outputs:
        raise ValueError(f"weight_packed must have {num_outputs} rows, the outputs of weight_shape")
    bits = _bits(words, num_inputs)
    codes = unpack(words, bits)[:, :num_inputs]
    zeros = _zeros(parts.get("weight_zero_point"), bits, num_outputs)
    groups = None if order is None or bool((order < 0).all()) else order.long()
    if zeros is None:
        zeros = scales.new_full((), 2 ** (bits - 1)).expand(scales.shape)
    return CodedWeight(codes, scales, zeros, groups)


def _shape(stored: Tensor) -> tuple[int, int]:
    """Return the numbers of outputs and inputs."""
    values = stored.tolist()
    if stored.shape != (2,) or not all(isinstance(size, int) and size > 0 for size in values):
        raise ValueError(f"weight_shape must be two integers above 0, outputs and inputs, got {values}")
    return values[0], values[1]


def _bits(words: Tensor, num_inputs: int) -> int:
    for bits in _BITS:
        if words.shape[1] == -(-num_inputs * bits // 32):
            return bits
    raise ValueError(f"a row of weight_packed must have {num_inputs} numbers of one of {sorted(_BITS)} bits")


def _zeros(zeros: Tensor | None, bits: int, num_outputs: int) -> Tensor | None:
    """Return unpacked zero points, [N, G], shifted to start at 0 like the codes."""
    import torch

    if zeros is None:
        return None
    if zeros.dim() != 2:
        raise ValueError("weight_zero_point must be a matrix")
    if zeros.dtype == torch.int8:  # written by versions that did not pack zero points
        shifted: Tensor = zeros.short() + 2 ** (bits - 1)
        return shifted
    return unpack(zeros.t(), bits)[:, :num_outputs].t()
