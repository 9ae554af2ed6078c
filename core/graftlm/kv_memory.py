"""How much KV memory an engine has, of what dtype, and whether sliding-window layers have one of their own."""

import logging
from dataclasses import dataclass

import psutil
import torch

from graftlm.config import EngineConfig
from graftlm.contracts import Model
from graftlm.errors import ConfigError
from graftlm.execution.kv_sizes import KVDemand, size_kv
from graftlm.execution.kv_store import KVStore
from graftlm.layers import KV_DTYPES
from graftlm.memory import WindowPages, WindowSpan
from graftlm.registry import Registry

__all__ = ["KVMemory", "size_memory"]

_logger = logging.getLogger(__name__)

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
    config: EngineConfig, registry: Registry, model: Model, device: torch.device, dtype: torch.dtype, context_len: int
) -> KVMemory:
    """Decide how much KV memory there is, and whether sliding-window layers get one of their own.

    Args:
        dtype: of the model.
    """
    settings = config.scheduling
    kv_dtype = KV_DTYPES.get(config.memory.kv_dtype, dtype)
    span = _window_span(config, registry, model)
    demand = KVDemand(
        kv_tokens=config.memory.kv_tokens,
        window_tokens=config.memory.window_tokens,
        kv_fraction=config.memory.kv_fraction,
        free_bytes=psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0],
        page_size=config.cache.page_size,
        num_rows=settings.max_running_requests,
        context_len=context_len,
        prefill_tokens=settings.prefill_tokens_per_step,
        span=span,
    )
    sizes = size_kv(model.attention_layers, kv_dtype, demand)
    _log_tokens(sizes.num_pages * demand.page_size, model, dtype, kv_dtype)
    if span is None or sizes.num_window_pages is None:
        return KVMemory(kv_dtype, sizes.num_pages, None)
    _logger.info(
        "sliding-window layers have a KV memory of their own: %d tokens of %d",
        sizes.num_window_pages * span.page_size,
        sizes.num_pages * span.page_size,
    )
    return KVMemory(kv_dtype, sizes.num_pages, WindowPages(sizes.num_pages, sizes.num_window_pages, span))


def _log_tokens(num_tokens: int, model: Model, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Say how many tokens fit, and in narrow memory what that gains."""
    token_bytes, plain_bytes = (KVStore.bytes_per_token(model.attention_layers, each) for each in (kv_dtype, dtype))
    gain = ""
    if kv_dtype != dtype:
        gain = f"; {plain_bytes / token_bytes:.2f} times as many as in {str(dtype).removeprefix('torch.')}"
    _logger.info(
        "KV memory: %s tokens in %s, %s bytes each%s",
        f"{num_tokens:,}",
        str(kv_dtype).removeprefix("torch."),
        f"{token_bytes:,}",
        gain,
    )


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
