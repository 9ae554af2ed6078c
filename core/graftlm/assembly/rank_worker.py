"""The worker of a rank: one rank's part of the model, in a process of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from graftlm.assembly.adapters import AdapterParts
from graftlm.assembly.device_memory import gib
from graftlm.assembly.device_side import LoadedDevice, load_rank
from graftlm.assembly.plugin_choices import choose_plugins
from graftlm.assembly.served_weights import NewWeights
from graftlm.assembly.target import Target, detect_platform
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.contracts import Communicator, Model, ParallelContext
from graftlm.errors import EngineError
from graftlm.execution.adapter_layers import AdapterLayers
from graftlm.execution.executor import Runner
from graftlm.layers.kernel_choice import choosing_kernels
from graftlm.layers.low_rank import LowRankFactors
from graftlm.parallel.protocol import RankSetup
from graftlm.registry import Registry

__all__ = ["WORKER", "AssembledWorker", "create"]

#: `RankSetup.worker` of this module's workers.
WORKER = f"{__name__}:create"


def create(setup: RankSetup, communicator: Communicator | None, on_stage: Callable[[str], None]) -> "AssembledWorker":
    """Load a rank's part of the model.

    Args:
        setup: `arguments` has the configuration, the import names of further plugins, and the number of replicas.

    Raises:
        GraftlmError: the subclass says which part failed.
    """
    arguments = setup.arguments
    config = EngineConfig.load(arguments["config"])
    platform = detect_platform(config)
    registry = Registry.load(config.plugins, arguments["plugins"], platform)
    path = resolve_checkpoint(config.model.path)
    parallel = ParallelContext(setup.rank, setup.size, communicator)
    target = Target.of(config, platform, path, load_model_config(path), arguments["num_replicas"], parallel)
    with choosing_kernels(config.model.kernels):
        chosen = choose_plugins(config, registry, target)
        weight_bytes = _size_of(chosen.model)  # before the weights are packed
        loaded = load_rank(config, registry, target, chosen, on_stage, on_stage, has_drafters=False)
    return AssembledWorker(loaded, weight_bytes)


def _size_of(model: Model) -> int:
    """Return the size in bytes of a model's tensors; 0 if it is not a torch module."""
    if not isinstance(model, torch.nn.Module):
        return 0
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _adapters_info(adapters: AdapterParts) -> dict[str, Any]:
    loaded = adapters.catalog.loaded.values()
    return {
        "loaded": [[one.name, one.path, one.slot, one.digest] for one in loaded],
        "targets": {name: list(shape) for name, shape in adapters.targets.items()},
        "dtype": str(adapters.layers.dtype).removeprefix("torch."),
    }


class AssembledWorker:
    """Runs plans and operations on a rank's parts; implements `RankWorker`.

    Args:
        loaded: the parts.
        weight_bytes: size of the weights before they are quantized or packed.
    """

    def __init__(self, loaded: LoadedDevice, weight_bytes: int) -> None:
        self._loaded = loaded
        self._weight_bytes = weight_bytes
        self._operations: Mapping[str, Callable[..., Any]] = {
            "release_kv": self._release_kv,
            "restore_kv": self._restore_kv,
            "replace_weights": self._replace_weights,
            "read_weight": self._read_weight,
            "drop_weights": self._drop_weights,
            "check_release": self._check_release,
            "release_weights": self._release_weights,
            "resume_weights": self._resume_weights,
            "set_adapter": self._set_adapter,
            "clear_adapters": self._clear_adapters,
        }

    @property
    def runner(self) -> Runner:
        """The runner of plans."""
        return self._loaded.parts.runner

    @property
    def info(self) -> Mapping[str, Any]:
        """Properties of the rank, as plain data."""
        loaded, model = self._loaded, self._loaded.chosen.model
        window = loaded.memory.window
        span = None if window is None else window.span
        weight_bytes = self._weight_bytes
        kv_bytes = loaded.parts.kv.num_bytes
        return {
            "num_pages": loaded.memory.num_pages,
            "max_row_pages": loaded.max_row_pages,
            "window": None
            if window is None or span is None
            else [window.num_window_pages, span.window_tokens, span.page_size, span.spare_tokens],
            "adapters": None if loaded.adapters is None else _adapters_info(loaded.adapters),
            "kv_dtype": str(loaded.memory.dtype).removeprefix("torch."),
            "generates": model.generates,
            "num_labels": model.num_labels,
            "attention": loaded.chosen.attention_provider.name,
            "weight_bytes": weight_bytes,
            "kv_bytes": kv_bytes,
            "summary": f"{gib(weight_bytes)} of weights, {gib(kv_bytes)} of KV memory, "
            f"{torch.get_num_threads()} threads",
        }

    def call(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Run an operation; see `RankWorker.call`."""
        if operation not in self._operations:
            raise EngineError(f"a rank has no operation {operation!r}")
        return self._operations[operation](**arguments)

    def _release_kv(self) -> None:
        self._loaded.weights.graphs.hold()
        self._loaded.parts.kv.release()

    def _restore_kv(self) -> None:
        graphs = self._loaded.weights.graphs
        if self._loaded.parts.kv.restore():
            graphs.recapture()
        graphs.unhold()

    def _replace_weights(self, path: str | None = None, tensors: bytes | None = None) -> list[Any]:
        new = NewWeights(None if path is None else Path(path), None if tensors is None else load(tensors))
        self._loaded.weights.replace(new)
        return self._state()

    def _read_weight(self, name: str) -> bytes:
        return save({"weight": self._loaded.weights.read(name).contiguous()})

    def _drop_weights(self) -> list[Any]:
        self._loaded.weights.drop()
        return self._state()

    def _check_release(self) -> list[Any]:
        self._loaded.weights.check_release()
        return self._state()

    def _release_weights(self, keep: bool) -> list[Any]:
        self._loaded.weights.release(keep=keep)
        return self._state()

    def _resume_weights(self) -> list[Any]:
        self._loaded.weights.resume()
        return self._state()

    def _set_adapter(self, slot: int, factors: bytes) -> None:
        tensors = load(factors)
        names = {name.rpartition(".")[0] for name in tensors}
        pairs = {name: LowRankFactors(tensors[f"{name}.down"], tensors[f"{name}.up"]) for name in names}
        self._adapters().set(slot, pairs)

    def _clear_adapters(self, slots: list[int]) -> None:
        self._adapters().clear(slots)

    def _adapters(self) -> AdapterLayers:
        if self._loaded.adapters is None:
            raise EngineError("this engine has no slots for adapters")
        return self._loaded.adapters.layers

    def _state(self) -> list[Any]:
        return [self._loaded.weights.is_released, self._loaded.weights.lacking]
