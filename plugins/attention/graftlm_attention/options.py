"""The options of this package's attention backends, as a YAML file gives them."""

from pathlib import Path
from typing import Literal

from graftlm.contracts import Options

__all__ = ["TorchNativeOptions"]


class TorchNativeOptions(Options):
    """Options of `torch_native`.

    Attributes:
        kernel: "native" compiles and uses the C++ kernel or fails, "torch" uses PyTorch's operations only, "auto" takes
            the C++ kernel where it can be built and says so in the log where it cannot.
        compiler: the C++ compiler, GCC 12 or later: a name on PATH or a path.
        kernel_cache_dir: where compiled kernels are kept; None: `graftlm` in the user's cache directory.
    """

    kernel: Literal["auto", "native", "torch"] = "auto"
    compiler: str = "g++"
    kernel_cache_dir: Path | None = None
