"""The options of this package's quantizations, as set in the YAML configuration."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["Fp8Options", "Int4Options", "Int8Options", "WeightOnlyOptions"]

_KEEP = "Projections that are not quantized, by their names in the checkpoint, such as `lm_head` or `down_proj`."


class Fp8Options(Options):
    """Options of `fp8`."""

    keep: tuple[str, ...] = Field(default=("lm_head",), description=_KEEP)


class WeightOnlyOptions(Options):
    """The common options of `int8` and `int4`."""

    keep: tuple[str, ...] = Field(default=("lm_head",), description=_KEEP)
    kernel: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="`native` compiles and uses the C++ kernel, and fails if that is impossible. `torch` uses only "
        "PyTorch's operations. `auto` uses the C++ kernel if it can be built; otherwise it logs why and uses PyTorch's "
        "operations.",
    )
    compiler: str = Field(default="g++", description="The C++ compiler, GCC 12 or later: a name on PATH or a path.")
    kernel_cache_dir: Path | None = Field(
        default=None, description="Directory of compiled kernels. Null: `graftlm` in the user's cache directory."
    )


class Int8Options(WeightOnlyOptions):
    """Options of `int8`."""

    group_size: Literal[32, 64, 128] | None = Field(
        default=None,
        description="Number of inputs of a row that share one scale. Null: all inputs, so that each output has one "
        "scale.",
    )


class Int4Options(WeightOnlyOptions):
    """Options of `int4`."""

    group_size: Literal[32, 64, 128] = Field(
        default=64,
        description="Number of inputs of a row that share a scale and an offset. Smaller groups are more exact and "
        "need more memory: 5 bits per weight with 32 inputs, 4.5 with 64, 4.25 with 128.",
    )
