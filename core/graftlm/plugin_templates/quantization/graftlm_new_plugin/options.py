"""The options of the quantization, as set in a configuration."""

from graftlm import Options
from pydantic import Field

__all__ = ["RowInt8Options"]


class RowInt8Options(Options):
    """The entries of `model.quantization.options`."""

    min_in_features: int = Field(
        default=64,
        ge=8,
        description="Minimum number of inputs of a layer. Layers with fewer inputs are not quantized, because little "
        "memory would be saved.",
    )
