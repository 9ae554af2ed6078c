"""The options of this package's quantizations, as a YAML file gives them."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["Fp8Options", "Int4Options", "Int8Options", "WeightOnlyOptions"]

_KEEP = "Projections that stay as they are, by their names in the checkpoint, such as `lm_head` or `down_proj`."


class Fp8Options(Options):
    """Options of `fp8`."""

    keep: tuple[str, ...] = Field(default=("lm_head",), description=_KEEP)


class WeightOnlyOptions(Options):
    """What `int8` and `int4` have in common."""

    keep: tuple[str, ...] = Field(default=("lm_head",), description=_KEEP)
    kernel: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="`native` compiles and uses the C++ kernel or fails, `torch` uses PyTorch's operations only, "
        "`auto` takes the C++ kernel where it can be built and says so in the log where it cannot.",
    )
    compiler: str = Field(default="g++", description="The C++ compiler, GCC 12 or later: a name on PATH or a path.")
    kernel_cache_dir: Path | None = Field(
        default=None, description="Where compiled kernels are kept; null: `graftlm` in the user's cache directory."
    )


class Int8Options(WeightOnlyOptions):
    """Options of `int8`."""

    group_size: Literal[32, 64, 128] | None = Field(
        default=None, description="Inputs of a row that share a scale; null: all of them, one scale per output."
    )


class Int4Options(WeightOnlyOptions):
    """Options of `int4`."""

    group_size: Literal[32, 64, 128] = Field(
        default=64,
        description="Inputs of a row that share a scale and an offset. Fewer are more exact and take more memory: 5, "
        "4.5 and 4.25 bits a weight.",
    )
