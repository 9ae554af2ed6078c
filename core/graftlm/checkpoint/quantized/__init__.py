"""Quantized weights in checkpoints: which format a checkpoint has, and what its integers stand for."""

from graftlm.checkpoint.quantized.detection import find_weight_format, without_quantization
from graftlm.checkpoint.quantized.weight_format import WeightFormat, WeightParts

__all__ = ["WeightFormat", "WeightParts", "find_weight_format", "without_quantization"]
