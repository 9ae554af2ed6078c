"""Compiles Triton kernels for devices that are not here; importing this module imports Triton.

Triton's interpreter takes more than its compiler does, so a kernel whose tests are all interpreted is not known to
compile. Nothing is run.
"""

from collections.abc import Mapping
from typing import Any

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["compile_kernel"]


def compile_kernel(
    kernel: Any, arguments: Mapping[str, object], capability: int, options: Mapping[str, object] | None = None
) -> Any:
    """Compile a kernel for CUDA.

    Args:
        kernel: a function under `triton.jit`, in a process without TRITON_INTERPRET.
        arguments: every parameter's type, such as "*bf16" or "i32", or, if it is not a string, its constant value.
            Pointers, and integers whose name ends in `stride`, are taken to be multiples of 16.
        capability: the device's compute capability, 90 for 9.0.
        options: `num_warps` and the like.

    Returns: Triton's compiled kernel: `asm["ptx"]` is its code, `metadata.shared` the bytes of shared memory it takes.

    Raises:
        triton.CompilationError: it does not compile.
    """
    names = kernel.arg_names
    types = {name: value if isinstance(value := arguments[name], str) else "constexpr" for name in names}
    constants = {(i,): arguments[name] for i, name in enumerate(names) if types[name] == "constexpr"}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*") or (types[name][0] == "i" and name.endswith("stride"))
    }
    source = ASTSource(kernel, types, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton_compile(source, target=target, options={"enable_fp_fusion": True, **(options or {})})
