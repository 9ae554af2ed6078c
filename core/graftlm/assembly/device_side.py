"""The side of an engine that holds tensors: in this process, or in the processes of several ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from graftlm.assembly.adapters import AdapterParts, make_adapters
from graftlm.assembly.attention import make_attention
from graftlm.assembly.device_parts import DeviceParts, make_device_parts
from graftlm.assembly.drafters import AssembledDrafters, make_drafters
from graftlm.assembly.graphs import wants_graphs
from graftlm.assembly.kv_allocation import allocate_kv
from graftlm.assembly.kv_memory import KVMemory
from graftlm.assembly.media import MediaParts, make_media
from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.rank_controls import RankAdapterParts, RankKV, RankWeights
from graftlm.assembly.resolved_plugins import ResolvedPlugins
from graftlm.assembly.served_weights import ServedWeights
from graftlm.assembly.target import Target
from graftlm.assembly.tiers import TierParts, assemble_tiers
from graftlm.assembly.weight_loading import load_weights
from graftlm.config import EngineConfig
from graftlm.contracts import ExecutorContext, StepExecutor
from graftlm.errors import InvariantError
from graftlm.execution.executor import executor_for
from graftlm.execution.kv_store import KVStore
from graftlm.execution.spare_core_runner import SpareCoreRunner
from graftlm.registry import Registry, configured_executor
from graftlm.runtime.spare_core import SpareCore

__all__ = ["DeviceSide", "load_device"]


@dataclass(frozen=True, slots=True)
class DeviceSide:
    """The parts with tensors, as the scheduler's side sees them.

    Attributes:
        executor: runs plans.
        memory: size of the KV memory.
        max_row_pages: maximum number of pages of a request.
        generates, num_labels: properties of the model; see `Model`.
        kv: the KV memory, which can be released.
        weights: replaces, reads and releases the model's weights.
        drafters: the drafters.
        tiers: the lower tiers of the cache; None without tiers.
        adapters: the adapters; None if the configuration does not enable adapters.
        device_parts: the parts that compute steps; None if they are in other processes.
        resolved: the chosen provider of each family, and the reason.
        spare_core: the CPU core for compiling grammars.
        media: the parts that serve pictures; None if the checkpoint has no tower.
    """

    executor: StepExecutor
    memory: KVMemory
    max_row_pages: int
    generates: bool
    num_labels: int | None
    kv: KVStore | RankKV
    weights: ServedWeights | RankWeights
    drafters: AssembledDrafters
    tiers: TierParts | None
    adapters: AdapterParts | RankAdapterParts | None
    device_parts: DeviceParts | None
    resolved: ResolvedPlugins
    spare_core: SpareCore
    media: MediaParts | None = None


@dataclass(frozen=True, slots=True)
class LoadedDevice:
    """The parts with tensors of one rank.

    Attributes:
        chosen: the providers.
        memory: size of the KV memory.
        max_row_pages: maximum number of pages of a request.
        drafters: the drafters; None in the process of a rank, because the scheduler has them.
        media: the parts that serve pictures; None if the checkpoint has no tower.
    """

    chosen: ChosenPlugins
    weights: ServedWeights
    memory: KVMemory
    max_row_pages: int
    adapters: AdapterParts | None
    drafters: AssembledDrafters | None
    tiers: TierParts | None
    parts: DeviceParts
    media: MediaParts | None


def load_rank(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
    *,
    has_drafters: bool,
) -> LoadedDevice:
    """Load the weights, and create every part with tensors.

    Args:
        on_stage: function that is called with the name of each stage.
        watcher: called with the progress of reading; None: progress is shown on a terminal.
        has_drafters: whether drafters are created, which may have memory on the device.

    Raises:
        GraftlmError: the subclass says which part failed.
    """
    weights = load_weights(config, registry, target, chosen, on_stage, watcher)
    media = make_media(config, registry, target, chosen, on_stage)
    adapters = make_adapters(config, chosen.model, target.num_sharing)
    drafters = make_drafters(config, registry, target, chosen, on_stage, watcher) if has_drafters else None
    head = None if drafters is None else drafters.head
    if head is not None:
        chosen = replace(chosen, head=head.head)

    has_graphs = wants_graphs(
        config,
        chosen.attention_provider.capabilities,
        target.device,
        has_states=bool(chosen.model.state_layers),
    )
    kv = allocate_kv(config, registry, target, chosen, has_graphs=has_graphs, on_stage=on_stage)
    attention = make_attention(config, registry, target, chosen, kv.store, kv.memory.window)
    fingerprint = weights.fingerprint if head is None else head.fingerprint(weights.fingerprint)
    tiers = assemble_tiers(config, registry, kv.store, fingerprint, target.num_replicas)
    parts = make_device_parts(
        config,
        registry,
        target,
        chosen,
        kv,
        attention,
        tiers,
        adapters,
        media,
        has_graphs=has_graphs,
        on_stage=on_stage,
    )
    weights.set_graphs(parts.graphs)
    return LoadedDevice(chosen, weights, kv.memory, kv.max_row_pages, adapters, drafters, tiers, parts, media)


def load_device(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
) -> DeviceSide:
    """Load the model in this process, and create the executor of its single rank; see `load_rank`."""
    loaded = load_rank(config, registry, target, chosen, on_stage, watcher, has_drafters=True)
    assert loaded.drafters is not None  # `has_drafters` is True
    spare_core = SpareCore(time.monotonic, config.grammar.timeout_s)
    runner, overlap = loaded.parts.runner, config.scheduling.overlap

    def run_here() -> StepExecutor:
        is_cpu = target.device.type == "cpu"
        return executor_for(
            SpareCoreRunner(runner, spare_core) if is_cpu else runner, target.device.type, overlap=overlap
        )

    return DeviceSide(
        executor=_local_executor(config, registry, run_here),
        memory=loaded.memory,
        max_row_pages=loaded.max_row_pages,
        generates=chosen.model.generates,
        num_labels=chosen.model.num_labels,
        kv=loaded.parts.kv,
        weights=loaded.weights,
        drafters=loaded.drafters,
        tiers=loaded.tiers,
        adapters=loaded.adapters,
        device_parts=loaded.parts,
        resolved=_resolved(config, registry, chosen, loaded.media),
        spare_core=spare_core,
        media=loaded.media,
    )


def _resolved(
    config: EngineConfig, registry: Registry, chosen: ChosenPlugins, media: MediaParts | None
) -> ResolvedPlugins:
    if media is None:
        return chosen.resolved
    path = ("media", "name")
    why = f"media.name: {config.origins[path].source}" if path in config.origins else "auto: the checkpoint"
    found = {"name": media.provider.name, "distribution": registry.distribution(media.provider), "why": why}
    return chosen.resolved | {"media": found}


def _local_executor(config: EngineConfig, registry: Registry, run_here: Callable[[], StepExecutor]) -> StepExecutor:
    provider = configured_executor(config, registry)
    if provider is None:
        return run_here()

    def run_on(processes: object) -> StepExecutor:
        raise InvariantError("an executor of a single local rank has no processes")

    context = ExecutorContext((), run_here, run_on)
    executor: StepExecutor = registry.create("executor", provider, config.parallel.options, context, config.origins)
    return executor
