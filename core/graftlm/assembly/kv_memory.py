"""Determines size and dtype of an engine's KV memory, including the separate memory of sliding-window layers."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graftlm.assembly.device_memory import DeviceMemory, check_room, gib
from graftlm.assembly.state_memory import StateMemory, check_states_supported, size_states
from graftlm.assembly.step_memory import StepMemory
from graftlm.config import EngineConfig, Problem, origin_of
from graftlm.contracts import AttentionLayer, StateLayer
from graftlm.errors import ConfigError
from graftlm.execution.kv_sizes import KVDemand, KVSizes, size_kv
from graftlm.execution.kv_store import KVStore
from graftlm.layers import KV_DTYPES
from graftlm.memory import StatePool, WindowPages, WindowSpan
from graftlm.registry import Registry

__all__ = ["DeviceMemory", "KVMemory", "check_kv_fits", "explain", "kv_bytes", "size_memory"]

_logger = logging.getLogger(__name__)

#: Maximum number of pages, because page ids are int32.
_MAX_PAGES = (1 << 31) - 1
#: Number of tokens before a row's window that are not freed, so that a later prompt can branch off shortly before the
#: row's end.
_SPARE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The size of the KV memory.

    Attributes:
        dtype: dtype of the stored keys and values.
        num_pages: number of pages of each layer; if `window` is set, of each full-attention layer.
        window: the allocator of window pages; None if sliding-window layers have no separate memory.
        states: the slots of recurrent states; None if the model has no such states.
    """

    dtype: torch.dtype
    num_pages: int
    window: WindowPages | None
    states: StatePool | None = None


def size_memory(
    config: EngineConfig,
    registry: Registry,
    layers: Sequence[AttentionLayer],
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
    steps: StepMemory,
    num_replicas: int = 1,
    device_memory: DeviceMemory | None = None,
    state_layers: Sequence[StateLayer] = (),
) -> KVMemory:
    """Determine the size of the KV memory, and whether sliding-window layers get a separate memory.

    Args:
        layers: all attention layers.
        dtype: dtype of the model.
        context_len: maximum number of tokens of a request.
        steps: memory that is reserved for steps.
        num_replicas: number of replicas that share the device. Each has its own KV memory.
        device_memory: the memory of the device; None: it is read.
        state_layers: all layers with a recurrent state.

    Effects: logs the size and its reason.

    Raises:
        ConfigError: the memory is too small for one request or for the configured size. Or `memory.window_tokens` is
            set, but the model or the cache does not support it. Or the model has recurrent states, which a part of the
            configuration does not support.
    """
    check_states_supported(config, registry, state_layers)
    settings = config.scheduling
    device_memory = (device_memory or DeviceMemory.read(device)).shared_by(num_replicas)
    kv_dtype = KV_DTYPES.get(config.memory.kv_dtype, dtype)
    span = _window_span(config, registry, layers)
    demand = KVDemand(
        kv_tokens=config.memory.kv_tokens,
        window_tokens=config.memory.window_tokens,
        kv_fraction=config.memory.kv_fraction,
        free_bytes=device_memory.free_bytes,
        page_size=config.cache.page_size,
        num_rows=settings.max_running_requests,
        context_len=context_len,
        prefill_tokens=settings.prefill_tokens_per_step,
        span=span,
        reserved_bytes=steps.num_bytes,
    )
    state_memory = size_states(config, registry, state_layers, demand.budget_bytes)
    if state_memory is not None:
        demand = _beside_states(demand, state_memory)
    sizes = size_kv(layers, kv_dtype, demand)
    check_kv_fits(config, sizes, demand, device_memory, layers, kv_dtype)
    _logger.info("%s", explain(sizes, demand, device_memory, steps, layers, dtype, kv_dtype))
    window = states = None
    if span is not None and sizes.num_window_pages is not None:
        window = WindowPages(sizes.num_pages, sizes.num_window_pages, span)
    if state_memory is not None:
        states = StatePool(state_memory.num_rows, state_memory.num_snapshots, sizes.num_pages)
    return KVMemory(kv_dtype, sizes.num_pages, window, states)


def _beside_states(demand: KVDemand, states: StateMemory) -> KVDemand:
    """Return the requirements with the memory that recurrent states leave for keys and values."""
    free_bytes = max(0, demand.free_bytes - states.num_bytes)
    return replace(demand, free_bytes=free_bytes)


def check_kv_fits(
    config: EngineConfig,
    sizes: KVSizes,
    demand: KVDemand,
    device_memory: DeviceMemory,
    layers: Sequence[AttentionLayer],
    kv_dtype: torch.dtype,
) -> None:
    """Check that configured sizes fit into the device's memory. If they do not fit into the free part, log a warning.

    Args:
        kv_dtype: dtype of the stored keys and values.

    Raises:
        ConfigError: a configured number of tokens needs more memory than the device has. The message contains the
            largest number that fits.
    """
    page_size, span = demand.page_size, demand.span
    windowed = [layer for layer in layers if layer.sliding_window is not None and span is not None]
    window_bytes = KVStore.bytes_per_token(windowed, kv_dtype) * page_size
    if demand.window_tokens is not None:
        check_room(
            demand.window_tokens // page_size * window_bytes,
            device_memory,
            _place(config, "window_tokens"),
            f"{_count(demand.window_tokens)} tokens of sliding-window layers",
            _count(device_memory.free_bytes // max(1, window_bytes) * page_size),
        )
    if demand.kv_tokens is None:
        return

    def bytes_of(num_tokens: int) -> int:
        sizes = size_kv(layers, kv_dtype, replace(demand, kv_tokens=num_tokens))
        return kv_bytes(sizes, layers, kv_dtype, page_size)

    needed = kv_bytes(sizes, layers, kv_dtype, page_size)
    limit = _MAX_PAGES * page_size
    if needed <= device_memory.free_bytes and demand.kv_tokens <= limit:
        return
    low, high = 0, min(demand.kv_tokens, limit) // page_size + 1
    while high - low > 1:  # `low` pages fit, `high` do not
        middle = (low + high) // 2
        fits = middle <= _MAX_PAGES and bytes_of(middle * page_size) <= device_memory.free_bytes
        low, high = (middle, high) if fits else (low, middle)
    place, configured, largest = _place(config, "kv_tokens"), f"{_count(demand.kv_tokens)} tokens", low * page_size
    check_room(needed, device_memory, place, configured, _count(largest))
    if demand.kv_tokens > limit:
        raise ConfigError(f"{place}: {configured} are more than {_MAX_PAGES:,} pages, expected at most {largest:,}")


def kv_bytes(sizes: KVSizes, layers: Sequence[AttentionLayer], kv_dtype: torch.dtype, page_size: int) -> int:
    """Return the size of a KV memory in bytes."""
    windowed = [layer for layer in layers if layer.sliding_window is not None and sizes.num_window_pages is not None]
    others = [layer for layer in layers if layer not in windowed]
    return page_size * (
        sizes.num_pages * KVStore.bytes_per_token(others, kv_dtype)
        + (sizes.num_window_pages or 0) * KVStore.bytes_per_token(windowed, kv_dtype)
    )


def _place(config: EngineConfig, name: str) -> str:
    """Return the line in the configuration file and the path of a setting in the section `memory`."""
    path = ("memory", name)
    return str(Problem(path, "", origin_of(path, config.origins)))


def _count(num_tokens: int) -> str:
    return f"{num_tokens:,}" if num_tokens < 10**24 else "over 10**24"


def explain(
    sizes: KVSizes,
    demand: KVDemand,
    device_memory: DeviceMemory,
    steps: StepMemory,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> str:
    """Return one line with the number of tokens of the KV memory, and the reason for this number.

    Args:
        dtype: dtype of the model.
        kv_dtype: dtype of the stored keys and values.
    """
    num_tokens = sizes.num_pages * demand.page_size
    token_bytes, plain_bytes = (KVStore.bytes_per_token(layers, each) for each in (kv_dtype, dtype))
    line = f"KV memory: {num_tokens:,} tokens of {token_bytes:,} bytes"
    if kv_dtype != dtype:
        line += f" in {_name(kv_dtype)}, {plain_bytes / token_bytes:.2f} times as many as in {_name(dtype)}"
    if sizes.num_window_pages is not None:
        line += f", {sizes.num_window_pages * demand.page_size:,} tokens for sliding-window layers"
    used = [] if device_memory.weight_bytes is None else [f"{gib(device_memory.weight_bytes)} weights"]
    used.append(f"{gib(device_memory.free_bytes)} free")
    if steps.num_bytes:
        used.append(f"{gib(steps.activation_bytes)} of it for activations, {gib(steps.graph_bytes)} for graphs")
    return f"{line}, {_reason(sizes, demand)} ({gib(device_memory.total_bytes)} of memory: {', '.join(used)})"


def _reason(sizes: KVSizes, demand: KVDemand) -> str:
    if demand.kv_tokens is not None:
        return "set by memory.kv_tokens"
    if sizes.num_pages == demand.useful_pages:
        return f"enough for {demand.num_rows:,} requests of {demand.context_len:,} tokens"
    if demand.budget_bytes < int(demand.free_bytes * demand.kv_fraction):
        return "limited by the memory for activations and graphs"
    return f"limited to memory.kv_fraction {demand.kv_fraction:g} of the free memory"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _window_span(config: EngineConfig, registry: Registry, layers: Sequence[AttentionLayer]) -> WindowSpan | None:
    """Return the window of the layers that get a separate memory; None if no layers get one.

    Raises:
        ConfigError: `memory.window_tokens` is set, but no layers can get a separate memory.
    """
    provider = registry.provider("cache", config.cache.name)
    windows = sorted({layer.sliding_window for layer in layers if layer.sliding_window is not None})
    if not provider.capabilities.window:
        if config.memory.window_tokens is not None:
            raise ConfigError(
                f"memory.window_tokens is set, but the cache {provider.name!r} has no separate memory for windows. "
                "Set cache.name: swa_radix, or leave memory.window_tokens out."
            )
        return None
    if len(windows) != 1:
        lens = ", ".join(map(str, windows))
        reason = f"the windows differ: {lens} tokens" if windows else "no layer has a sliding window"
        if config.memory.window_tokens is not None:
            raise ConfigError(
                "memory.window_tokens is set, but the sliding-window layers cannot have a separate memory: "
                f"{reason}. Remove memory.window_tokens."
            )
        _logger.warning("cache %s: sliding-window layers get no separate memory: %s", provider.name, reason)
        return None
    spare_tokens = min(_SPARE_TOKENS, windows[0] // 4) if provider.capabilities.reuses else 0
    return WindowSpan(windows[0], config.cache.page_size, spare_tokens)
