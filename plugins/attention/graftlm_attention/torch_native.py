"""Chooses the implementation of `torch_native` for this machine: the compiled kernel or PyTorch's operations."""

import logging
import os

from graftlm.contracts import AttentionContext
from graftlm.layers.kernel_build import KernelBuildError, user_cache_dir
from graftlm_attention.native_paged import NativePagedAttention, load_kernel, native_obstacle
from graftlm_attention.options import TorchNativeOptions
from graftlm_attention.torch_paged import TorchPagedAttention

__all__ = ["create_torch_native"]

_logger = logging.getLogger(__name__)


def create_torch_native(
    options: TorchNativeOptions, context: AttentionContext
) -> NativePagedAttention | TorchPagedAttention:
    """Create the backend. Its attribute `kernel` names the chosen implementation: "native" or "torch".

    Effects: may compile the kernel, once per machine (a few seconds).

    Raises:
        KernelBuildError: `options.kernel` is "native", and the kernel cannot be built or does not support the model.
    """
    if options.kernel == "torch":
        return TorchPagedAttention(context)
    try:
        return _create_native(options, context)
    except KernelBuildError as error:
        if options.kernel == "native":
            raise
        _logger.info("torch_native uses PyTorch's operations instead of its compiled kernel: %s", error)
        return TorchPagedAttention(context)


def _create_native(options: TorchNativeOptions, context: AttentionContext) -> NativePagedAttention:
    obstacle = native_obstacle(context)
    if obstacle is not None:
        raise KernelBuildError(f"{obstacle}. Set kernel: torch or auto.")
    cache_dir = options.kernel_cache_dir or user_cache_dir(os.environ)
    return NativePagedAttention(context, load_kernel(options.compiler, cache_dir))
