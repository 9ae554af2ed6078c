"""Sets up the configured quantization of a model's linear layers."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from graftlm.config import EngineConfig
from graftlm.contracts import Model, Quantization, QuantizationCapabilities, QuantizationContext
from graftlm.errors import ConfigError
from graftlm.layers import GroupedLinear, Linear
from graftlm.registry import Registry

__all__ = ["QuantizedLayers", "quantize_layers"]

_logger = logging.getLogger(__name__)

_MB = 1e6

_Layer: TypeAlias = Linear | GroupedLinear


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The layers whose weights are quantized each time after weights are loaded.

    Attributes:
        name: name of the quantization.
        layers: path in the model -> layer.
        obstacles: path in the model -> reason why that layer is not quantized.
    """

    name: str
    layers: Mapping[str, _Layer]
    obstacles: Mapping[str, str]

    def convert(self) -> None:
        """Quantize the loaded layers one by one, and log the saved memory."""
        for layer in self.layers.values():
            layer.pack()
        kernels = [kernel for layer in self.layers.values() for kernel in layer.kernels]
        now = sum(kernel.num_bytes for kernel in kernels)
        before = sum(layer.num_weights * layer.weight.dtype.itemsize for layer in self.layers.values())
        _logger.info(
            "%d linear layers are quantized by %s: %.1f MB instead of %.1f MB, %.1f MB saved%s",
            len(kernels), self.name, now / _MB, before / _MB, (before - now) / _MB, self._remark(),
        )  # fmt: skip

    def _remark(self) -> str:
        shown = [f"{name} ({why})" for name, why in list(self.obstacles.items())[:3]]
        more = len(self.obstacles) - len(shown)
        return f"; not quantized: {', '.join(shown)}{f' and {more} more' if more else ''}" if shown else ""


def quantize_layers(
    config: EngineConfig, registry: Registry, model: Model, device: torch.device, dtype: torch.dtype
) -> QuantizedLayers | None:
    """Prepare the linear layers of a model for quantization. `convert` quantizes them after the weights are loaded.

    Returns: None if the configuration sets no quantization.

    Raises:
        ConfigError: the quantization does not support the device or the dtype, or no layer can be quantized.
        PluginError: the quantization cannot be created.
    """
    settings = config.model.quantization
    if settings.name is None:
        return None
    provider = registry.provider("quantization", settings.name)
    reason = _misfit(provider.capabilities, device, dtype)
    if reason is not None:
        raise ConfigError(
            f"quantization {settings.name!r} does not fit this engine: {reason}. Set model.quantization to another "
            "quantization or to null."
        )
    context = QuantizationContext(device, dtype)
    quantization: Quantization = registry.create("quantization", provider, settings.options, context, config.origins)
    return _prepare_layers(settings.name, quantization, model)


def _prepare_layers(name: str, quantization: Quantization, model: Model) -> QuantizedLayers:
    """Set the quantization of every linear layer that can be quantized.

    Raises:
        ConfigError: no layer can be quantized.
    """
    layers: dict[str, _Layer] = {}
    obstacles: dict[str, str] = {}
    for path, layer in _linears(model).items():
        why = quantization.obstacle(layer.describe(path))
        if why is None:
            layer.quantize_with(quantization)
            layers[path] = layer
        else:
            obstacles[path] = why
    if not layers:
        reasons = "; ".join(f"{path}: {why}" for path, why in list(obstacles.items())[:3])
        raise ConfigError(
            f"quantization {name!r} cannot quantize any layer of this model: "
            f"{reasons or 'it has no layers of graftlm.layers.Linear'}. Set model.quantization: null."
        )
    return QuantizedLayers(name, layers, obstacles)


def _linears(model: Model) -> dict[str, _Layer]:
    if not isinstance(model, nn.Module):
        return {}
    return {path: module for path, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)}


def _misfit(can: QuantizationCapabilities, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a quantization does not support a device or a dtype; None if it supports both."""
    dtype_name = str(dtype).removeprefix("torch.")
    if device.type not in can.devices:
        return f"it runs on {', '.join(can.devices)}, but the device is {device.type}"
    if can.dtypes is not None and dtype_name not in can.dtypes:
        return f"it computes in {', '.join(can.dtypes)}, but the model computes in {dtype_name}"
    return None
