"""What a configuration may give to the quantization."""

from graftlm import Options
from pydantic import Field

__all__ = ["RowInt8Options"]


class RowInt8Options(Options):
    """What stands under `model.quantization.options`."""

    min_in_features: int = Field(
        default=64, ge=8, description="Layers with fewer inputs stay as they are: little memory is to be gained."
    )
