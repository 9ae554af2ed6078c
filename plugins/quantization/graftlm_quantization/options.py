"""The options of this package's quantizations, as a YAML file gives them."""

from pathlib import Path
from typing import Literal

from graftlm.contracts import Options

__all__ = ["Fp8Options", "Int4Options", "Int8Options", "WeightOnlyOptions"]


class Fp8Options(Options):
    """Options of `fp8`.

    Attributes:
        keep: checkpoint names of projections that stay as they are, such as "lm_head" or "down_proj".
    """

    keep: tuple[str, ...] = ("lm_head",)


class WeightOnlyOptions(Options):
    """What `int8` and `int4` have in common.

    Attributes:
        keep: checkpoint names of projections that stay as they are, such as "lm_head" or "down_proj".
        kernel: "native" compiles and uses the C++ kernel or fails, "torch" uses PyTorch's operations only, "auto" takes
            the C++ kernel where it can be built and says so in the log where it cannot.
        compiler: the C++ compiler, GCC 12 or later: a name on PATH or a path.
        kernel_cache_dir: where compiled kernels are kept; None: `graftlm` in the user's cache directory.
    """

    keep: tuple[str, ...] = ("lm_head",)
    kernel: Literal["auto", "native", "torch"] = "auto"
    compiler: str = "g++"
    kernel_cache_dir: Path | None = None


class Int8Options(WeightOnlyOptions):
    """Options of `int8`.

    Attributes:
        group_size: inputs of a row that share a scale; None: all of them, one scale per output.
    """

    group_size: Literal[32, 64, 128] | None = None


class Int4Options(WeightOnlyOptions):
    """Options of `int4`.

    Attributes:
        group_size: inputs of a row that share a scale and an offset. Fewer are more exact and take more memory: 5, 4.5
            and 4.25 bits a weight.
    """

    group_size: Literal[32, 64, 128] = 64
