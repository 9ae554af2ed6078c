"""Determines the size of the KV memory, and allocates it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from graftlm.assembly.attention import make_attention
from graftlm.assembly.graphs import captured_sizes
from graftlm.assembly.kv_memory import KVMemory, size_memory
from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.step_memory import LargestSteps, StepMemory, measure_steps, meter_for
from graftlm.assembly.target import Target
from graftlm.config import EngineConfig
from graftlm.errors import ConfigError
from graftlm.execution.kv_store import KVStore
from graftlm.execution.state_store import StateStore
from graftlm.memory import WindowPages
from graftlm.registry import Registry
from graftlm.speculation import MAX_DRAFTED_TOKENS

__all__ = ["AllocatedKV", "allocate_kv"]


@dataclass(frozen=True, slots=True)
class AllocatedKV:
    """The allocated KV memory.

    `allocate_kv` creates it; the runner, the attention backends and the scheduler get its parts.

    Attributes:
        memory: size of the KV memory, and the allocator of window pages if sliding-window layers have a separate
            memory.
        store: the tensors.
        max_row_pages: maximum number of pages of a request.
    """

    memory: KVMemory
    store: KVStore
    max_row_pages: int


def allocate_kv(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    *,
    has_graphs: bool,
    on_stage: Callable[[str], None],
) -> AllocatedKV:
    """Measure the memory that the largest steps need, and allocate KV memory in the remaining device memory.

    Args:
        has_graphs: whether one-token steps are captured as CUDA graphs, which need a spare page.
        on_stage: function that is called with the name of each stage.

    Raises:
        ConfigError: the device has too little free memory, or the configuration does not fit the model.
    """
    on_stage("measuring steps")
    steps = _measure_steps(config, registry, target, chosen, has_graphs=has_graphs)
    on_stage("allocating KV memory")
    memory = size_memory(
        config,
        registry,
        chosen.attention_layers,
        target.device,
        target.dtype,
        target.context_len,
        steps,
        target.num_sharing,
        state_layers=chosen.model.state_layers,
    )
    memory = _agreed(memory, target)
    store = _allocate(config, target, chosen, memory, spare_pages=int(has_graphs))
    return AllocatedKV(memory, store, min(memory.num_pages, -(-target.context_len // config.cache.page_size)))


def _agreed(memory: KVMemory, target: Target) -> KVMemory:
    """Return the size that fits on every rank. All ranks make this call."""
    communicator = target.parallel.communicator
    if communicator is None:
        return memory
    window = memory.window
    sizes = [memory.num_pages, 0 if window is None else window.num_window_pages]
    num_pages, num_window_pages = communicator.all_reduce(torch.tensor(sizes, device=target.device), "min").tolist()
    if window is None:
        return replace(memory, num_pages=num_pages)
    return replace(memory, num_pages=num_pages, window=WindowPages(num_pages, num_window_pages, window.span))


def _measure_steps(
    config: EngineConfig, registry: Registry, target: Target, chosen: ChosenPlugins, *, has_graphs: bool
) -> StepMemory:
    """Return the memory that steps need. It is measured only if the size of the KV memory depends on it."""
    meter = meter_for(target.device)
    if meter is None or config.memory.kv_tokens is not None:
        return StepMemory()
    steps = LargestSteps(
        num_rows=config.scheduling.max_running_requests,
        prefill_tokens=config.scheduling.prefill_tokens_per_step,
        context_len=target.context_len,
        page_size=config.cache.page_size,
        graph_sizes=captured_sizes(config) if has_graphs else (),
        num_drafted=_num_drafted(config),
    )
    return measure_steps(
        steps,
        chosen.model,
        chosen.attention_layers,
        lambda kv: make_attention(config, registry, target, chosen, kv),
        target.dtype,
        target.device,
        meter,
        chosen.head,
    )


def _num_drafted(config: EngineConfig) -> int:
    """Return the maximum number of drafted tokens in a step."""
    if config.speculation.drafter.name is None and config.grammar.jump_forward != "exact":
        return 0
    return min(MAX_DRAFTED_TOKENS, config.scheduling.max_running_requests * config.speculation.max_drafts)


def _allocate(
    config: EngineConfig, target: Target, chosen: ChosenPlugins, memory: KVMemory, *, spare_pages: int
) -> KVStore:
    """Allocate the tensors.

    Raises:
        ConfigError: the device cannot allocate the tensors, for instance because other programs use its memory.
    """
    num_window_pages = None if memory.window is None else memory.window.num_window_pages
    layers, page_size = chosen.attention_layers, config.cache.page_size
    states = None
    try:
        if memory.states is not None:
            states = StateStore(chosen.model.state_layers, memory.states.num_slots, target.device)
        return KVStore(
            layers, memory.num_pages, page_size, memory.dtype, target.device, num_window_pages, spare_pages, states
        )
    except (RuntimeError, MemoryError) as error:  # torch raises different errors for a full host and a full device
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{memory.num_pages * page_size:,} tokens of KV memory cannot be allocated: {reason}. Lower "
            "memory.kv_tokens or memory.kv_fraction, or free memory."
        ) from error
