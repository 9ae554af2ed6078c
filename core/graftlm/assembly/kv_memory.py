"""How much KV memory an engine has, of what dtype, and whether sliding-window layers have one of their own."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graftlm.assembly.device_memory import DeviceMemory, check_room, gib
from graftlm.assembly.step_memory import StepMemory
from graftlm.config import EngineConfig, Problem, origin_of
from graftlm.contracts import AttentionLayer, Model
from graftlm.errors import ConfigError
from graftlm.execution.kv_sizes import KVDemand, KVSizes, size_kv
from graftlm.execution.kv_store import KVStore
from graftlm.layers import KV_DTYPES
from graftlm.memory import WindowPages, WindowSpan
from graftlm.registry import Registry

__all__ = ["DeviceMemory", "KVMemory", "check_kv_fits", "explain", "kv_bytes", "size_memory"]

_logger = logging.getLogger(__name__)

#: Pages are numbered in 32 bits.
_MAX_PAGES = (1 << 31) - 1
#: Tokens that rows keep in front of their window, for prompts that go on from a little before a row's end.
_SPARE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class KVMemory:
    """How much KV memory there is.

    Attributes:
        dtype: of keys and values as they are held.
        num_pages: pages; without `window`, of every layer.
        window: lends window pages, when sliding-window layers have a memory of their own.
    """

    dtype: torch.dtype
    num_pages: int
    window: WindowPages | None


def size_memory(
    config: EngineConfig,
    registry: Registry,
    model: Model,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
    steps: StepMemory,
    num_replicas: int = 1,
    have: DeviceMemory | None = None,
) -> KVMemory:
    """Decide how much KV memory there is, and whether sliding-window layers get one of their own; log why.

    Args:
        dtype: of the model.
        steps: what must be left for steps to run.
        num_replicas: how many share the device, each with a memory of its own.
        have: the memory of the device; None reads it.

    Raises:
        ConfigError: there is too little memory for one request, more is configured than there is, or windows are
            configured that the model has not.
    """
    settings = config.scheduling
    have = (have or DeviceMemory.read(device)).shared_by(num_replicas)
    held = KV_DTYPES.get(config.memory.kv_dtype, dtype)
    span = _window_span(config, registry, model)
    demand = KVDemand(
        kv_tokens=config.memory.kv_tokens,
        window_tokens=config.memory.window_tokens,
        kv_fraction=config.memory.kv_fraction,
        free_bytes=have.free_bytes,
        page_size=config.cache.page_size,
        num_rows=settings.max_running_requests,
        context_len=context_len,
        prefill_tokens=settings.prefill_tokens_per_step,
        span=span,
        reserved_bytes=steps.num_bytes,
    )
    sizes = size_kv(model.attention_layers, held, demand)
    check_kv_fits(config, sizes, demand, have, model.attention_layers, held)
    _logger.info("%s", explain(sizes, demand, have, steps, model.attention_layers, dtype, held))
    if span is None or sizes.num_window_pages is None:
        return KVMemory(held, sizes.num_pages, None)
    return KVMemory(held, sizes.num_pages, WindowPages(sizes.num_pages, sizes.num_window_pages, span))


def check_kv_fits(
    config: EngineConfig,
    sizes: KVSizes,
    demand: KVDemand,
    have: DeviceMemory,
    layers: Sequence[AttentionLayer],
    held: torch.dtype,
) -> None:
    """Refuse numbers of tokens that the device cannot hold; warn of those that its free memory cannot hold.

    Args:
        held: of keys and values as they are held.

    Raises:
        ConfigError: a configured number takes more than the device has; the message names the largest that fits.
    """
    page_size, span = demand.page_size, demand.span
    windowed = [layer for layer in layers if layer.sliding_window is not None and span is not None]
    window_bytes = KVStore.bytes_per_token(windowed, held) * page_size
    if demand.window_tokens is not None:
        check_room(
            demand.window_tokens // page_size * window_bytes,
            have,
            _place(config, "window_tokens"),
            f"{_count(demand.window_tokens)} tokens of sliding-window layers",
            _count(have.free_bytes // max(1, window_bytes) * page_size),
        )
    if demand.kv_tokens is None:
        return

    def bytes_of(num_tokens: int) -> int:
        sizes = size_kv(layers, held, replace(demand, kv_tokens=num_tokens))
        return kv_bytes(sizes, layers, held, page_size)

    needed = kv_bytes(sizes, layers, held, page_size)
    limit = _MAX_PAGES * page_size
    if needed <= have.free_bytes and demand.kv_tokens <= limit:
        return
    low, high = 0, min(demand.kv_tokens, limit) // page_size + 1
    while high - low > 1:  # `low` pages fit, `high` do not
        middle = (low + high) // 2
        fits = middle <= _MAX_PAGES and bytes_of(middle * page_size) <= have.free_bytes
        low, high = (middle, high) if fits else (low, middle)
    place, asked, largest = _place(config, "kv_tokens"), f"{_count(demand.kv_tokens)} tokens", low * page_size
    check_room(needed, have, place, asked, _count(largest))
    if demand.kv_tokens > limit:
        raise ConfigError(f"{place}: {asked} are more than {_MAX_PAGES:,} pages, expected {largest:,} at most")


def kv_bytes(sizes: KVSizes, layers: Sequence[AttentionLayer], held: torch.dtype, page_size: int) -> int:
    """Return the bytes of a KV memory."""
    windowed = [layer for layer in layers if layer.sliding_window is not None and sizes.num_window_pages is not None]
    others = [layer for layer in layers if layer not in windowed]
    return page_size * (
        sizes.num_pages * KVStore.bytes_per_token(others, held)
        + (sizes.num_window_pages or 0) * KVStore.bytes_per_token(windowed, held)
    )


def _place(config: EngineConfig, name: str) -> str:
    """Return where a setting of memory was written, and its path."""
    path = ("memory", name)
    return str(Problem(path, "", origin_of(path, config.origins)))


def _count(num_tokens: int) -> str:
    return f"{num_tokens:,}" if num_tokens < 10**24 else "over 10**24"


def explain(
    sizes: KVSizes,
    demand: KVDemand,
    have: DeviceMemory,
    steps: StepMemory,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    held: torch.dtype,
) -> str:
    """Say in one line how many tokens fit into KV memory, and why.

    Args:
        dtype: of the model.
        held: of keys and values as they are held.
    """
    num_tokens = sizes.num_pages * demand.page_size
    token_bytes, plain_bytes = (KVStore.bytes_per_token(layers, each) for each in (held, dtype))
    line = f"KV memory: {num_tokens:,} tokens of {token_bytes:,} bytes"
    if held != dtype:
        line += f" in {_name(held)}, {plain_bytes / token_bytes:.2f} times as many as in {_name(dtype)}"
    if sizes.num_window_pages is not None:
        line += f", sliding-window layers keep {sizes.num_window_pages * demand.page_size:,} of them"
    taken = [] if have.weight_bytes is None else [f"{gib(have.weight_bytes)} weights"]
    taken.append(f"{gib(have.free_bytes)} free")
    if steps.num_bytes:
        taken.append(f"{gib(steps.activation_bytes)} of it kept for activations, {gib(steps.graph_bytes)} for graphs")
    return f"{line}, {_reason(sizes, demand)} ({gib(have.total_bytes)} of memory: {', '.join(taken)})"


def _reason(sizes: KVSizes, demand: KVDemand) -> str:
    if demand.kv_tokens is not None:
        return "as memory.kv_tokens says"
    if sizes.num_pages == demand.useful_pages:
        return f"all that {demand.num_rows:,} requests of {demand.context_len:,} tokens can use"
    if demand.budget_bytes < int(demand.free_bytes * demand.kv_fraction):
        return "what fits beside activations and graphs"
    return f"what fits into memory.kv_fraction {demand.kv_fraction:g} of what is free"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _window_span(config: EngineConfig, registry: Registry, model: Model) -> WindowSpan | None:
    """Return the window of the layers that get a memory of their own; None, and why in the log, when none do."""
    provider = registry.provider("cache", config.cache.name)
    windows = sorted({layer.sliding_window for layer in model.attention_layers if layer.sliding_window is not None})
    if not provider.capabilities.window:
        if config.memory.window_tokens is not None:
            raise ConfigError(
                f"memory.window_tokens is set, but the cache {provider.name!r} keeps no windows apart. "
                "Set cache.name: swa_radix, or leave memory.window_tokens out."
            )
        return None
    if len(windows) != 1:
        reason = "no layer has one" if not windows else f"they differ: {', '.join(map(str, windows))} tokens"
        if config.memory.window_tokens is not None:
            raise ConfigError(
                f"memory.window_tokens is set, but this model has no sliding window that all windows share: {reason}. "
                "Leave it out."
            )
        _logger.warning("cache %s: sliding windows get no memory of their own: %s", provider.name, reason)
        return None
    spare_tokens = min(_SPARE_TOKENS, windows[0] // 4) if provider.capabilities.reuses else 0
    return WindowSpan(windows[0], config.cache.page_size, spare_tokens)
