"""Starts the ranks of a replica in processes of their own."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graftlm.assembly.device_side import DeviceSide
from graftlm.assembly.drafters import make_drafters
from graftlm.assembly.kv_memory import KVMemory
from graftlm.assembly.plugin_choices import create_model
from graftlm.assembly.rank_controls import RankAdapterParts, RankAdapters, RankKV, RankWeights
from graftlm.assembly.rank_worker import WORKER
from graftlm.assembly.resolved_plugins import resolve_plugins
from graftlm.assembly.served_weights import ServedWeights
from graftlm.assembly.target import Target
from graftlm.checkpoint import check_sizes
from graftlm.config import EngineConfig
from graftlm.contracts import (
    Model,
    ParallelContext,
    Provider,
    RankOptions,
    StepExecutor,
)
from graftlm.errors import ConfigError, InvariantError
from graftlm.lora.adapters import AdapterCatalog, LoadedAdapter
from graftlm.lora.peft_adapter import AdapterWeights, read_peft_adapter
from graftlm.memory import WindowPages, WindowSpan
from graftlm.parallel.launch import rank_context
from graftlm.parallel.rank_group import RankGroup
from graftlm.registry import Registry
from graftlm.runtime.spare_core import SpareCore

__all__ = ["check_split", "start_ranks"]

_HINT = "Set parallel.tensor: 1 and parallel.executor: auto"


def check_split(
    config: EngineConfig, registry: Registry, target: Target, provider: Provider[Model], num_ranks: int
) -> Model:
    """Check that a model can be split over ranks, and return the part of rank 0 without memory.

    Raises:
        ConfigError: the model cannot be split, or not over this number of ranks.
    """
    if not provider.capabilities.tensor_parallel:
        raise ConfigError(f"parallel: the model {provider.name!r} cannot be split over ranks. {_HINT}")
    meta = replace(target, device=torch.device("meta"), parallel=ParallelContext(0, num_ranks))
    return create_model(config, registry, provider, meta.model_context)


def start_ranks(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    provider: Provider[StepExecutor],
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
) -> DeviceSide:
    """Start the processes of all ranks, and wait until they have loaded the model.

    Args:
        provider: the executor.
        on_stage: function that is called with the stages of each rank.
        watcher: see `make_drafters`.

    Raises:
        GraftlmError: the configuration cannot be served by ranks, or a rank failed; the message has its error.
    """
    _check_features(config, registry, target)
    model_provider = registry.model_for(target.model_config.architectures, config.model.architecture)
    check_sizes(target.model_config, target.path)
    check_split(config, registry, target, model_provider, config.parallel.tensor)
    groups: list[RankGroup] = []
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"  # memory, not a disk
    folder = Path(tempfile.mkdtemp(prefix="graftlm-", dir=shared))
    try:
        executor = _create_executor(config, registry, target, provider, on_stage, folder, groups)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # all processes have opened their sockets and files
    if not groups:
        raise InvariantError(f"the executor {provider.name!r} has not started the ranks")
    return _device_side(config, registry, target, model_provider, provider, executor, groups[0], on_stage, watcher)


def _check_features(config: EngineConfig, registry: Registry, target: Target) -> None:
    """Refuse features that only an engine in one process has.

    Raises:
        ConfigError: the configuration enables such a feature.
    """
    where = f"not supported while the ranks are separate processes. {_HINT}"
    if target.model_config.media is not None:
        raise ConfigError(f"parallel: {target.path} has a tower for pictures, which is {where}")
    if registry.provider("cache", config.cache.name).capabilities.tiers:
        raise ConfigError(f"cache.name: {config.cache.name!r} has lower tiers, which are {where}")


def _create_executor(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    provider: Provider[StepExecutor],
    on_stage: Callable[[str], None],
    folder: Path,
    groups: list[RankGroup],
) -> StepExecutor:
    size = config.parallel.tensor
    options = registry.options(provider, config.parallel.options, "parallel.options", config.origins)

    def run_here() -> StepExecutor:
        raise ConfigError(f"the executor {provider.name!r} runs a single rank, but parallel.tensor is {size}")

    context = rank_context(
        size,
        folder,
        WORKER,
        {
            "config": config.model_dump(mode="json", exclude={"server"}),
            "plugins": registry.provider_modules(),
            "num_replicas": target.num_replicas,
        },
        options=options if isinstance(options, RankOptions) else RankOptions(),
        device=target.device.type,
        num_threads=max(1, torch.get_num_threads() // size) if target.device.type == "cpu" else None,
        run_here=run_here,
        environment_of=lambda rank: {} if target.device.type == "cpu" else _device_of(rank, size),
        on_stage=on_stage,
        on_group=groups.append,
    )
    executor: StepExecutor = registry.create("executor", provider, options, context, config.origins)
    return executor


def _device_of(rank: int, size: int) -> Mapping[str, str]:
    """Return the variable that selects the CUDA device of a rank.

    Raises:
        ConfigError: the replica has fewer devices than ranks.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(torch.cuda.device_count())] if visible is None else visible.split(",")
    if len(devices) < size:
        raise ConfigError(
            f"parallel.tensor is {size}, but this replica has {len(devices)} CUDA devices. Set parallel.tensor to at "
            f"most {len(devices)}"
        )
    return {"CUDA_VISIBLE_DEVICES": devices[rank]}


def _device_side(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    model_provider: Provider[Model],
    provider: Provider[StepExecutor],
    executor: StepExecutor,
    group: RankGroup,
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
) -> DeviceSide:
    info = group.infos[0]

    def make_meta_model() -> Model:
        return create_model(
            config, registry, model_provider, replace(target, device=torch.device("meta")).model_context
        )

    checks = ServedWeights(
        config, make_meta_model(), target.model_config, make_meta_model, None, target.path, target.dtype
    )
    attention = registry.find("attention", info["attention"])
    chosen = {"model": model_provider, "attention": attention, "executor": provider}
    device = f"{target.platform.device}/{target.dtype_name}, {config.parallel.tensor} ranks"
    kv_dtype: torch.dtype = getattr(torch, info["kv_dtype"])
    window = None
    if info["window"] is not None:
        num_window_pages, window_tokens, page_size, spare_tokens = info["window"]
        window = WindowPages(info["num_pages"], num_window_pages, WindowSpan(window_tokens, page_size, spare_tokens))
    return DeviceSide(
        executor=executor,
        memory=KVMemory(kv_dtype, info["num_pages"], window),
        max_row_pages=info["max_row_pages"],
        generates=info["generates"],
        num_labels=info["num_labels"],
        kv=RankKV(group, kv_dtype),
        weights=RankWeights(group, checks),
        drafters=make_drafters(config, registry, target, None, on_stage, watcher),
        tiers=None,
        adapters=None if info["adapters"] is None else _adapters(config, group, info["adapters"]),
        device_parts=None,
        resolved=resolve_plugins(config, registry, chosen, device=device),
        spare_core=SpareCore(time.monotonic, config.grammar.timeout_s),
    )


def _adapters(config: EngineConfig, group: RankGroup, info: Mapping[str, Any]) -> RankAdapterParts:
    """Return the adapters' parts on the scheduler's side, from the properties of a rank."""
    targets = {name: (rows, columns) for name, (rows, columns) in info["targets"].items()}
    dtype: torch.dtype = getattr(torch, info["dtype"])
    catalog = AdapterCatalog(config.lora.max_loaded)
    for name, path, slot, digest in info["loaded"]:
        catalog.add(LoadedAdapter(name, path, slot, digest))

    def read(folder: Path) -> AdapterWeights:
        return read_peft_adapter(folder, targets, config.lora.max_rank, dtype)

    return RankAdapterParts(catalog, RankAdapters(group), read)
