"""Chooses the operations for a model's layers, once for a device and a dtype."""

import logging
from pathlib import Path

import torch
from torch import nn

from graftlm.errors import ProviderUnavailableError
from graftlm.layers.ops.contract import LayerOps, UsesOps
from graftlm.layers.ops.native_ops import NATIVE_DTYPES, NativeOps
from graftlm.layers.ops.torch_ops import TorchOps

__all__ = ["bind_ops", "choose_ops", "fused_ops"]

_logger = logging.getLogger(__name__)


def bind_ops(model: object, ops: LayerOps) -> None:
    """Pass `ops` to each module of a model that calls them, which are the modules with the base class `UsesOps`."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, UsesOps):
                module.use_ops(ops)


def choose_ops(device: torch.device, dtype: torch.dtype, cache_dir: Path, compiler: str = "g++") -> LayerOps:
    """Return the fused operations, or PyTorch's if there are none, and log the reason. See `fused_ops`."""
    try:
        return fused_ops(device, dtype, cache_dir, compiler)
    except ProviderUnavailableError as error:
        _logger.info(
            "norms, rotary embedding and activations use PyTorch's operations instead of fused kernels: %s", error
        )
        return TorchOps()


def fused_ops(device: torch.device, dtype: torch.dtype, cache_dir: Path, compiler: str = "g++") -> LayerOps:
    """Return operations that are each computed in one pass.

    Args:
        device, dtype: device and dtype of the hidden states.
        cache_dir: folder of compiled kernels.
        compiler: C++ compiler, as a name on PATH or a path.

    Effects: on a CPU, may compile the kernels, once per machine (a few seconds).

    Raises:
        ProviderUnavailableError: there are no kernels for the device and dtype, or a requirement is missing.
    """
    if device.type == "cuda":
        return _triton_ops()
    if device.type != "cpu" or dtype not in NATIVE_DTYPES:
        raise ProviderUnavailableError(f"there are no fused operations in {dtype} on a {device.type}")
    return NativeOps.load(compiler, cache_dir)


def _triton_ops() -> LayerOps:
    try:
        # Imported here, because only CUDA devices need Triton; it may be missing on other machines.
        from graftlm.layers.ops.triton_ops import TritonOps
    except ImportError as error:
        raise ProviderUnavailableError(f"Triton cannot be imported ({error}). Install graftlm[cuda].") from error
    return TritonOps()
