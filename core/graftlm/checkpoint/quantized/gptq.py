"""GPTQ weights (AutoGPTQ, GPTQModel): integers packed along the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from graftlm.checkpoint.quantized.coded_weight import CodedWeight, consecutive_groups, unpack
from graftlm.checkpoint.quantized.settings import read_group_size
from graftlm.checkpoint.quantized.weight_format import WeightFormat, WeightParts
from graftlm.errors import CheckpointError, UnsupportedArchitectureError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GptqFormat"]

_BITS = (2, 4, 8)
#: checkpoint_format -> number that was subtracted from a zero point before packing.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class GptqFormat(WeightFormat):
    """Packed codes and zero points, and the group of each input.

    For N outputs, K inputs, G groups, and p numbers per word: qweight int32 [K/p, N], qzeros int32 [G, N/p], scales
    [G, N], g_idx int32 [K].

    Attributes:
        bits: number of bits of most weights; a module may have another number, which follows from its tensors' shapes.
        group_size: number of consecutive inputs of a group; None: all inputs.
        has_order: whether g_idx has the group of each input, which activation order needs.
        zero_offset: number to add to packed zero points.
    """

    bits: int
    group_size: int | None
    has_order: bool
    zero_offset: int

    parts: ClassVar[Set[str]] = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> GptqFormat:
        """Read a quantization_config."""
        bits = settings.get("bits")
        if bits not in _BITS:
            raise CheckpointError(f"quantization_config of gptq: bits must be one of {_BITS}, got {bits!r}")
        stored_as = str(settings.get("checkpoint_format") or "gptq")
        if settings.get("is_marlin_format"):
            stored_as = "marlin"
        if stored_as not in _ZERO_OFFSETS:
            raise UnsupportedArchitectureError(
                f"The checkpoint's GPTQ weights are stored as {stored_as!r}, which is not supported. Use a checkpoint "
                f"stored as {' or '.join(_ZERO_OFFSETS)}"
            )
        # Some tools write a g_idx of zeros without activation order. If desc_act is missing, g_idx is used.
        has_order = settings.get("desc_act") is not False
        return cls(bits, read_group_size(settings, "group_size"), has_order, _ZERO_OFFSETS[stored_as])

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return f"GPTQ, {self.bits} bits"

    def main_part(self, parts: Set[str]) -> str | None:
        """Return "qweight", the tensor with the codes; None if the module has no such tensor."""
        return "qweight" if "qweight" in parts else None

    def coded_weight(self, parts: WeightParts) -> CodedWeight:
        """Unpack codes and zero points."""
        scales, qzeros = parts.matrix("scales"), parts.matrix("qzeros")  # [G, N], [G, N/p]
        bits = _bits(scales, qzeros)
        codes = unpack(parts.matrix("qweight").t(), bits)  # [N, K]
        # A zero point of 0 wrapped around when 1 was subtracted.
        zeros = (unpack(qzeros, bits) + self.zero_offset) & (2**bits - 1)
        return CodedWeight(codes, scales.t(), zeros.t(), self._groups(parts, codes.shape[1]))

    def _groups(self, parts: WeightParts, num_inputs: int) -> Tensor | None:
        order = parts.get("g_idx") if self.has_order else None
        if order is not None:
            return order.long()
        return consecutive_groups(num_inputs, self.group_size or num_inputs)


def _bits(scales: Tensor, qzeros: Tensor) -> int:
    """Return the number of bits of a code, from the columns of the two tensors; it may differ between layers."""
    for bits in _BITS:
        if qzeros.shape[1] * 32 == scales.shape[1] * bits:
            return bits
    raise ValueError(f"qzeros must have one number of {_BITS} bits per scale")
