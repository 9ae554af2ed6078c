"""AWQ weights for the `gemm` kernel: 4-bit integers packed along the outputs, interleaved."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from graftlm.checkpoint.quantized.coded_weight import CodedWeight, unpack
from graftlm.checkpoint.quantized.weight_format import WeightFormat, WeightParts
from graftlm.errors import CheckpointError, UnsupportedArchitectureError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AwqFormat"]

_BITS = 4
_PER_WORD = 32 // _BITS
#: Index in a word of each of 8 consecutive outputs; even outputs are first.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class AwqFormat(WeightFormat):
    """For N outputs, K inputs and G groups: qweight int32 [K, N/8], qzeros int32 [G, N/8], scales [G, N]."""

    parts: ClassVar[Set[str]] = frozenset(("qweight", "qzeros", "scales"))

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> AwqFormat:
        """Read a quantization_config, or a quant_config.json."""
        bits = settings.get("bits", settings.get("w_bit"))
        if bits != _BITS:
            raise CheckpointError(f"quantization_config of awq: bits must be {_BITS}, got {bits!r}")
        version = str(settings.get("version") or "gemm").lower()
        if version != "gemm":
            raise UnsupportedArchitectureError(
                f"The checkpoint's AWQ weights are stored for the kernel {version!r}, which is not supported. Use a "
                f"checkpoint for the kernel 'gemm'"
            )
        if settings.get("zero_point") is False:
            raise UnsupportedArchitectureError(
                "The checkpoint's AWQ weights have no zero points, which is not supported"
            )
        return cls()

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return f"AWQ, {_BITS} bits"

    def main_part(self, parts: Set[str]) -> str | None:
        """Return "qweight", the tensor with the codes; None if the module has no such tensor."""
        return "qweight" if "qweight" in parts else None

    def coded_weight(self, parts: WeightParts) -> CodedWeight:
        """Unpack codes and zero points."""
        codes, zeros = (_in_order(unpack(parts[name], _BITS)) for name in ("qweight", "qzeros"))
        return CodedWeight(codes.t(), parts.matrix("scales").t(), zeros.t())


def _in_order(numbers: Tensor) -> Tensor:
    """Return unpacked numbers, [R, N], in the order of the outputs."""
    words = numbers.view(len(numbers), -1, _PER_WORD)
    return words[..., _PLACES].flatten(1)
