"""Compiles Triton kernels for devices that this machine does not have. Importing this module imports Triton.

Triton's interpreter accepts code that Triton's compiler refuses, so a kernel may pass its tests in the interpreter and
not compile. This module only compiles kernels and does not run them.
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
        kernel: a function decorated with `triton.jit`, in a process without TRITON_INTERPRET.
        arguments: parameter -> type ("*bf16", "i32", ...) or constant value, which must not be a string.
            The compiler may assume that pointers, and integers whose name ends in `stride`, are multiples of 16.
        capability: compute capability of the device, e.g. 90 for 9.0.
        options: options of Triton's compiler, such as `num_warps`.

    Returns:
        Triton's compiled kernel. `asm["ptx"]` is the code, `metadata.shared` the required shared memory in bytes.

    Raises:
        triton.CompilationError: the kernel does not compile.
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
