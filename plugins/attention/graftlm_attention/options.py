"""Options of this package's attention backends."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from graftlm.contracts import Options

__all__ = ["FlashInferOptions", "TorchNativeOptions", "TritonOptions"]


class TorchNativeOptions(Options):
    """Options of `torch_native`."""

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


class TritonOptions(Options):
    """Options of `triton`."""

    split_tokens: int | None = Field(
        default=None,
        ge=128,
        multiple_of=128,
        description="Length in tokens, a multiple of 128, of the pieces into which the contexts of decode requests "
        "are split. With a fixed length, decode is batch-invariant: a request's numbers are "
        "bit-identical in every batch. Null: the number of pieces is chosen to fill the device, which "
        "is faster for few requests.",
    )


class FlashInferOptions(Options):
    """Options of `flashinfer`."""

    backend: Literal["auto", "fa2", "fa3"] = Field(
        default="auto",
        description="FlashInfer's kernels for prefill chunks: `fa2` for every device, `fa3` for Hopper. With `auto`, "
        "FlashInfer chooses.",
    )
    cascade_tokens: int | None = Field(
        default=512,
        ge=1,
        description="If all requests of a step start with at least this many equal tokens, their keys and values are "
        "read once for all requests. Null: never. It does not apply to steps that replay a CUDA graph.",
    )
    workspace_mib: int = Field(default=128, ge=16, description="Memory for partial results, in MiB.")
