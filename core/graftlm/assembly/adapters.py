"""Creates the layers and the memory for LoRA adapters from the configuration."""

import logging
from collections.abc import Callable, Mapping
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
    """The parts that an engine needs for adapters.

    `make_adapters` creates them; `make_device_parts` and the intake use them.

    Attributes:
        catalog: the adapters by name.
        layers: the layers that store the adapters' weights.
        read: function that reads the adapter in a folder; raises AdapterError if it does not fit the model.
        targets: projection that adapters may change, as name in the checkpoint -> (out, in) of the whole model.
    """

    catalog: AdapterCatalog
    layers: AdapterLayers
    read: Callable[[Path], AdapterWeights]
    targets: Mapping[str, tuple[int, int]]


def make_adapters(config: EngineConfig, model: Model, num_replicas: int = 1) -> AdapterParts | None:
    """Allocate memory for adapters in a model whose weights are loaded, and load the configured adapters.

    Args:
        num_replicas: number of engines that share the device's memory.

    Returns: None if the configuration does not enable adapters.

    Raises:
        AdapterError: an adapter cannot be loaded.
        ConfigError: the model has no layers for adapters, it does not have a layer in `lora.target_modules`, or the
            device has too little memory.
    """
    settings = config.lora
    if not settings.takes_adapters:
        return None
    adaptable = adaptable_layers(model) if isinstance(model, nn.Module) else []
    names = {name for layer in adaptable for name in layer.parts}
    if not names:
        raise ConfigError(
            f"lora: {type(model).__name__} has no layers for adapters: its projections are not instances of "
            "graftlm.layers.Linear. Leave lora out, or set model.architecture to another implementation."
        )
    target_names = names if settings.target_modules is None else set(settings.target_modules)
    if not target_names <= names:
        raise ConfigError(
            f"lora.target_modules names {', '.join(sorted(target_names - names))}, which this model does not have. "
            f"Available: {', '.join(sorted(names))}"
        )
    linears = [layer for layer in adaptable if not layer.parts.keys().isdisjoint(target_names)]
    _check_room(config, linears, num_replicas)
    layers = AdapterLayers(linears, settings.max_loaded, settings.max_rank)
    _logger.info(
        "%d linear layers have slots for %d adapters of up to rank %d: %.1f MB",
        len(linears), settings.max_loaded, settings.max_rank, layers.num_bytes / _MB,
    )  # fmt: skip
    catalog = AdapterCatalog(settings.max_loaded)
    targets = _targets(linears, target_names)

    def read(folder: Path) -> AdapterWeights:
        return read_peft_adapter(folder, targets, settings.max_rank, layers.dtype)

    parts = AdapterParts(catalog, layers, read, targets)
    for slot, (name, path) in enumerate(settings.adapters.items(), start=1):
        catalog.check_new(name)
        weights = parts.read(Path(path))
        layers.set(slot, weights.factors)
        catalog.add(LoadedAdapter(name, path, slot, weights.digest))
        _logger.info("adapter %s of %s is loaded", name, path)
    return parts


def _check_room(config: EngineConfig, layers: list[Linear], num_replicas: int) -> None:
    """Check that the device's memory is large enough for the configured adapters.

    Raises:
        ConfigError: the memory is too small.
    """
    settings, path = config.lora, ("lora", "max_loaded")
    device_memory = DeviceMemory.read(layers[0].weight.device).shared_by(num_replicas)
    slot_bytes = sum(low_rank_bytes(layer, settings.max_rank) for layer in layers)
    check_room(
        settings.max_loaded * slot_bytes,
        device_memory,
        str(Problem(path, "", origin_of(path, config.origins))),
        f"{settings.max_loaded} adapters of rank {settings.max_rank}",
        f"{device_memory.free_bytes // slot_bytes:,} at this rank",
    )


def _targets(layers: list[Linear], names: set[str]) -> dict[str, tuple[int, int]]:
    return {
        f"{layer.prefix}{name}": (shard.size, layer.inputs.size)
        for layer in layers
        for name, shard in layer.outputs.items()
        if name in names
    }
