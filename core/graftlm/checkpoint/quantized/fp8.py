"""Float8 weights of DeepSeek, Qwen and vLLM's early tools, with one scale or one scale per block."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar

from graftlm.checkpoint.quantized.coded_weight import CodedWeight
from graftlm.checkpoint.quantized.scale_grid import scaled_codes
from graftlm.checkpoint.quantized.settings import read_block_size
from graftlm.checkpoint.quantized.weight_format import WeightFormat, WeightParts

__all__ = ["Fp8Format"]

_SCALES = ("weight_scale_inv", "weight_scale")  # both are factors, despite the name `inv`


@dataclass(frozen=True)
class Fp8Format(WeightFormat):
    """For N outputs and K inputs: weight float8 [N, K]; weight_scale_inv or weight_scale per tensor, output or block.

    Attributes:
        block: numbers of outputs and inputs of a block; None: one scale per tensor or per output.
    """

    block: tuple[int, int] | None

    parts: ClassVar[Set[str]] = frozenset(("weight", *_SCALES))
    ignored: ClassVar[Set[str]] = frozenset(("input_scale", "activation_scale", "q_scale", "k_scale", "v_scale"))

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> Fp8Format:
        """Read a quantization_config."""
        return cls(read_block_size(settings, "weight_block_size"))

    @property
    def summary(self) -> str:
        """The format in a few words."""
        return "FP8" if self.block is None else f"FP8, blocks of {self.block[0]} x {self.block[1]}"

    def main_part(self, parts: Set[str]) -> str | None:
        """Return "weight" if there are scales."""
        return "weight" if parts & set(_SCALES) else None

    def coded_weight(self, parts: WeightParts) -> CodedWeight:
        """Return the codes with their scales."""
        name = _SCALES[0] if _SCALES[0] in parts else _SCALES[1]
        return scaled_codes(parts["weight"], parts[name], block=self.block)
