"""Detects and decodes the formats of quantized weights in checkpoints."""

from graftlm.checkpoint.quantized.detection import find_weight_format, without_quantization
from graftlm.checkpoint.quantized.weight_format import WeightFormat, WeightParts

__all__ = ["WeightFormat", "WeightParts", "find_weight_format", "without_quantization"]
