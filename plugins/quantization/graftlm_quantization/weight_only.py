"""The quantizations `int8` and `int4`: decides which layers are quantized, and chooses the kernel."""

import logging
import os

import torch
from torch import Tensor

from graftlm.contracts import LinearKernel, LinearLayer, Quantization
from graftlm.layers.kernel_build import KernelBuildError, user_cache_dir
from graftlm_quantization.coded_matrix import INPUTS_MULTIPLE, encode
from graftlm_quantization.native_linear import NativeLibrary, NativeLinear
from graftlm_quantization.options import WeightOnlyOptions
from graftlm_quantization.torch_linear import TorchLinear

__all__ = ["WeightOnly"]

_logger = logging.getLogger(__name__)


class WeightOnly(Quantization):
    """Quantizes weights to codes of 4 or 8 bits. Activations are not changed.

    Attributes:
        kernel: the chosen implementation, "native" or "torch".

    Args:
        bits: bits of a code, 4 or 8.
        group_size: number of inputs that share a scale; None: all inputs of a row.
        options: options that set which layers are not quantized, and the kernel.

    Effects: may compile the kernel, which takes a few seconds and happens once per machine.

    Raises:
        KernelBuildError: `options.kernel` is "native", and the kernel cannot be built.
    """

    def __init__(self, bits: int, group_size: int | None, options: WeightOnlyOptions) -> None:
        self._bits = bits
        self._group_size = group_size
        self._keep = frozenset(options.keep)
        self._library = _load(options)
        self.kernel = "torch" if self._library is None else "native"

    def obstacle(self, layer: LinearLayer) -> str | None:
        """Return why a layer is not quantized (option `keep`, or its number of inputs), or None if it is."""
        kept = [name for name in layer.projections if name in self._keep]
        if kept:
            return f"option keep names {kept[0]}"
        multiple = self._group_size or INPUTS_MULTIPLE
        if layer.in_features % multiple:
            return f"its number of inputs, {layer.in_features}, is not a multiple of {multiple}"
        return None

    def convert(self, weight: Tensor, bias: Tensor | None) -> LinearKernel:
        """Quantize a weight, [N, K] on the CPU; the bias is [N] or None."""
        matrix = encode(weight, self._bits, self._group_size or weight.shape[1])
        own_bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        if self._library is None:
            return TorchLinear(matrix, own_bias)
        return NativeLinear(matrix, own_bias, self._library)


def _load(options: WeightOnlyOptions) -> NativeLibrary | None:
    """Return the compiled kernel, or None to use PyTorch's operations.

    Raises:
        KernelBuildError: `options.kernel` is "native", and the kernel cannot be built.
    """
    if options.kernel == "torch":
        return None
    try:
        return NativeLibrary.load(options.compiler, options.kernel_cache_dir or user_cache_dir(os.environ))
    except KernelBuildError as error:
        if options.kernel == "native":
            raise
        _logger.warning("quantized layers use PyTorch's operations, which are slow: %s", error)
        return None
