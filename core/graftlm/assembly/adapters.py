"""From the configuration to the layers of a model that take low-rank adapters, and where those are kept."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from graftlm.assembly.device_memory import DeviceMemory, check_room
from graftlm.config import EngineConfig, Problem, origin_of
from graftlm.contracts import Model
from graftlm.errors import ConfigError
from graftlm.execution.adapter_layers import AdapterLayers, adaptable_layers
from graftlm.layers import Linear
from graftlm.layers.low_rank import low_rank_bytes
from graftlm.lora.adapters import AdapterCatalog, LoadedAdapter
from graftlm.lora.peft_adapter import AdapterWeights, read_peft_adapter

__all__ = ["AdapterParts", "make_adapters"]

_logger = logging.getLogger(__name__)

_MB = 1e6


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What an engine with adapters has besides.

    Attributes:
        read: from a folder to an adapter that fits the model; raises AdapterError.
    """

    catalog: AdapterCatalog
    layers: AdapterLayers
    read: Callable[[Path], AdapterWeights]


def make_adapters(config: EngineConfig, model: Model, num_replicas: int = 1) -> AdapterParts | None:
    """Make room for adapters in a model whose weights are loaded, and load those that the configuration names.

    Args:
        num_replicas: engines that share the device's memory.

    Returns: None if the configuration wants none.

    Raises:
        AdapterError: one of them cannot be loaded.
        ConfigError: the model has no layers that take adapters, or none of those that the configuration names; or the
            device has too little memory.
    """
    settings = config.lora
    if not settings.takes_adapters:
        return None
    every = adaptable_layers(model) if isinstance(model, nn.Module) else []
    names = {name for layer in every for name in layer.parts}
    if not names:
        raise ConfigError(
            f"lora: {type(model).__name__} has no layers that take adapters: its projections are no "
            "graftlm.layers.Linear. Leave lora out, or set model.architecture to another implementation."
        )
    wanted = names if settings.target_modules is None else set(settings.target_modules)
    if not wanted <= names:
        raise ConfigError(
            f"lora.target_modules names {', '.join(sorted(wanted - names))}, which this model does not have. "
            f"Available: {', '.join(sorted(names))}"
        )
    linears = [layer for layer in every if not layer.parts.keys().isdisjoint(wanted)]
    _check_room(config, linears, num_replicas)
    layers = AdapterLayers(linears, settings.max_loaded, settings.max_rank)
    _logger.info(
        "%d linear layers take up to %d adapters of rank %d at most: %.1f MB",
        len(linears), settings.max_loaded, settings.max_rank, layers.num_bytes / _MB,
    )  # fmt: skip
    catalog = AdapterCatalog(settings.max_loaded)
    targets = _targets(linears, wanted)

    def read(folder: Path) -> AdapterWeights:
        return read_peft_adapter(folder, targets, settings.max_rank, layers.dtype)

    parts = AdapterParts(catalog, layers, read)
    for slot, (name, path) in enumerate(settings.adapters.items(), start=1):
        catalog.check_new(name)
        weights = parts.read(Path(path))
        layers.set(slot, weights.factors)
        catalog.add(LoadedAdapter(name, path, slot, weights.digest))
        _logger.info("adapter %s of %s is loaded", name, path)
    return parts


def _check_room(config: EngineConfig, layers: list[Linear], num_replicas: int) -> None:
    """Refuse room for more, or larger, adapters than the device has memory for."""
    settings, path = config.lora, ("lora", "max_loaded")
    have = DeviceMemory.read(layers[0].weight.device).shared_by(num_replicas)
    slot_bytes = sum(low_rank_bytes(layer, settings.max_rank) for layer in layers)
    check_room(
        settings.max_loaded * slot_bytes,
        have,
        str(Problem(path, "", origin_of(path, config.origins))),
        f"{settings.max_loaded} adapters of rank {settings.max_rank}",
        f"{have.free_bytes // slot_bytes:,} at this rank",
    )


def _targets(layers: list[Linear], names: set[str]) -> dict[str, tuple[int, int]]:
    return {
        f"{layer.prefix}{name}": (size, layer.in_features)
        for layer in layers
        for name, size in layer.parts.items()
        if name in names
    }
