"""The options of this package's attention backends, as a YAML file gives them."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["FlashInferOptions", "TorchNativeOptions", "TritonOptions"]


class TorchNativeOptions(Options):
    """Options of `torch_native`."""

    kernel: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="`native` compiles and uses the C++ kernel or fails, `torch` uses PyTorch's operations only, "
        "`auto` takes the C++ kernel where it can be built and says so in the log where it cannot.",
    )
    compiler: str = Field(default="g++", description="The C++ compiler, GCC 12 or later: a name on PATH or a path.")
    kernel_cache_dir: Path | None = Field(
        default=None, description="Where compiled kernels are kept; null: `graftlm` in the user's cache directory."
    )


class TritonOptions(Options):
    """Options of `triton`."""

    split_tokens: int | None = Field(
        default=None,
        ge=128,
        multiple_of=128,
        description="The length of the pieces in which the contexts of one-token requests are read, a multiple of 128; "
        "a request's numbers are then the same, bit for bit, whatever it is decoded beside. Null: as many pieces as "
        "fill the device, which is faster where there are few requests.",
    )


class FlashInferOptions(Options):
    """Options of `flashinfer`."""

    backend: Literal["auto", "fa2", "fa3"] = Field(
        default="auto",
        description="FlashInfer's kernels for prompt chunks: `fa2` for every device, `fa3` for Hopper, `auto` as it "
        "chooses.",
    )
    cascade_tokens: int | None = Field(
        default=512,
        ge=1,
        description="A step all of whose requests begin with the same tokens, at least so many, reads those once. "
        "Null: never. Steps that replay a graph do not.",
    )
    workspace_mib: int = Field(default=128, ge=16, description="Memory for partial results, in MiB.")
