"""Which of a model's linear layers are quantized, from the configuration, and what that saves."""

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
    """The layers that are converted each time that weights have been loaded.

    Attributes:
        name: of the quantization.
        layers: place in the model -> layer.
        obstacles: place in the model -> why that layer stays as it is.
    """

    name: str
    layers: Mapping[str, _Layer]
    obstacles: Mapping[str, str]

    def convert(self) -> None:
        """Convert the loaded layers, one after the other, and log what that saves."""
        for layer in self.layers.values():
            layer.pack()
        kernels = [kernel for layer in self.layers.values() for kernel in layer.kernels]
        now = sum(kernel.num_bytes for kernel in kernels)
        before = sum(layer.num_weights * layer.weight.dtype.itemsize for layer in self.layers.values())
        _logger.info(
            "%d linear layers are quantized by %s: %.1f MB instead of %.1f, %.1f saved%s",
            len(kernels), self.name, now / _MB, before / _MB, (before - now) / _MB, self._remark(),
        )  # fmt: skip

    def _remark(self) -> str:
        shown = [f"{name} ({why})" for name, why in list(self.obstacles.items())[:3]]
        more = len(self.obstacles) - len(shown)
        return f"; as they were: {', '.join(shown)}{f' and {more} more' if more else ''}" if shown else ""


def quantize_layers(
    config: EngineConfig, registry: Registry, model: Model, device: torch.device, dtype: torch.dtype
) -> QuantizedLayers | None:
    """Have the linear layers of a model converted when its weights are loaded; None if the configuration asks for none.

    Raises:
        ConfigError: the quantization does not run on the device or in the dtype, or no layer can be quantized.
        PluginError: it cannot be created.
    """
    settings = config.model.quantization
    if settings.name is None:
        return None
    provider = registry.provider("quantization", settings.name)
    reason = _misfit(provider.capabilities, device, dtype)
    if reason is not None:
        raise ConfigError(
            f"quantization {settings.name!r} does not fit this engine: {reason}. Set model.quantization to another, or "
            f"to null."
        )
    context = QuantizationContext(device, dtype)
    quantization: Quantization = registry.create("quantization", provider, settings.options, context, config.origins)
    return _divide(settings.name, quantization, model)


def _divide(name: str, quantization: Quantization, model: Model) -> QuantizedLayers:
    """Ask about every linear layer, and tell those without an obstacle."""
    layers: dict[str, _Layer] = {}
    obstacles: dict[str, str] = {}
    for place, layer in _linears(model).items():
        why = quantization.obstacle(layer.describe(place))
        if why is None:
            layer.quantize_with(quantization)
            layers[place] = layer
        else:
            obstacles[place] = why
    if not layers:
        reasons = "; ".join(f"{place}: {why}" for place, why in list(obstacles.items())[:3])
        raise ConfigError(
            f"quantization {name!r} finds nothing to quantize in this model: "
            f"{reasons or 'it has no layers of graftlm.layers.Linear'}. Set model.quantization: null."
        )
    return QuantizedLayers(name, layers, obstacles)


def _linears(model: Model) -> dict[str, _Layer]:
    if not isinstance(model, nn.Module):
        return {}
    return {place: module for place, module in model.named_modules() if isinstance(module, Linear | GroupedLinear)}


def _misfit(can: QuantizationCapabilities, device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why a quantization cannot serve an engine, or return None."""
    dtype_name = str(dtype).removeprefix("torch.")
    if device.type not in can.devices:
        return f"it runs on {', '.join(can.devices)}, the device is {device.type}"
    if can.dtypes is not None and dtype_name not in can.dtypes:
        return f"it computes in {', '.join(can.dtypes)}, the model in {dtype_name}"
    return None
