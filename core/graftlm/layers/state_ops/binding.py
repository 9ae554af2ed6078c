"""Chooses the operations with a recurrent state, once for a device and a dtype."""

import logging
from pathlib import Path

import torch
from torch import nn

from graftlm.errors import ProviderUnavailableError
from graftlm.layers.state_ops.contract import StateOps, UsesStateOps
from graftlm.layers.state_ops.native_state_ops import NativeStateOps
from graftlm.layers.state_ops.torch_state_ops import TorchStateOps

__all__ = ["bind_state_ops", "choose_state_ops"]

_logger = logging.getLogger(__name__)


def bind_state_ops(model: object, ops: StateOps) -> None:
    """Pass `ops` to each module of a model that calls them, which are the modules with the base `UsesStateOps`."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, UsesStateOps):
                module.use_state_ops(ops)


def choose_state_ops(device: torch.device, cache_dir: Path, compiler: str = "g++") -> StateOps:
    """Return the kernels for a device, or PyTorch's operations if there are none, and log the reason.

    Args:
        cache_dir: folder of compiled kernels.
        compiler: C++ compiler, as a name on PATH or a path.

    Effects: on a CPU, may compile the kernels, once per machine (a few seconds).
    """
    try:
        return _kernels(device, cache_dir, compiler)
    except ProviderUnavailableError as error:
        _logger.info("recurrent states use PyTorch's operations instead of compiled kernels: %s", error)
        return TorchStateOps()


def _kernels(device: torch.device, cache_dir: Path, compiler: str) -> StateOps:
    """Return the kernels for a device.

    Raises:
        ProviderUnavailableError: there are no kernels for the device, or a requirement is missing.
    """
    if device.type == "cpu":
        return NativeStateOps.load(compiler, cache_dir)
    if device.type != "cuda":
        raise ProviderUnavailableError(f"there are no kernels for a {device.type} device")
    try:
        # Imported here, because only CUDA devices need Triton; it may be missing on other machines.
        from graftlm.layers.state_ops.triton_state_ops import TritonStateOps
    except ImportError as error:
        raise ProviderUnavailableError(f"Triton cannot be imported ({error}). Install graftlm[cuda].") from error
    return TritonStateOps()
