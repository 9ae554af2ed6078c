"""Loading of a draft model, with a KV memory of its own."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from graftlm.assembly.device_memory import DeviceMemory, check_room, gib
from graftlm.assembly.plugin_choices import ChosenPlugins, choose_attention
from graftlm.assembly.target import Target
from graftlm.checkpoint import (
    check_same_vocabulary,
    check_sizes,
    iter_weights,
    load_model_config,
    resolve_checkpoint,
    watch_reading,
)
from graftlm.config import EngineConfig, Problem, origin_of
from graftlm.contracts import AttentionBackend, AttentionContext, DraftModel, Model, ModelContext
from graftlm.errors import ConfigError, ModelError
from graftlm.execution.greedy_model import GreedyModel
from graftlm.execution.kv_store import KVStore
from graftlm.layers import KV_DTYPES
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import bind_ops, choose_ops
from graftlm.registry import Registry

__all__ = ["load_draft_model"]

_logger = logging.getLogger(__name__)

_OPTIONS: Final = ("speculation", "drafter", "options")


def load_draft_model(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    path: str,
    kv_tokens: int,
    watcher: Callable[[str], None] | None,
) -> DraftModel:
    """Load a draft model on the device and in the dtype of the served model.

    Args:
        path: as `model.path`.
        kv_tokens: size of its KV memory in tokens; whole pages are allocated.
        watcher: called with the progress of reading; None: progress is shown on a terminal.

    Effects: logs the size of the KV memory.

    Raises:
        ConfigError: the checkpoint cannot be used or has another vocabulary, or the memory cannot be allocated. The
            message has the place of the option in the configuration.
    """
    try:
        place = resolve_checkpoint(path, ".".join((*_OPTIONS, "path")))
        context = _context(config, target, place)
        model = _loaded(config, registry, context, place, watcher)
    except ModelError as error:
        raise ConfigError(f"{_place(config, 'path')}: the draft model cannot be used: {error}") from error
    kv = _allocate(config, target, model, kv_tokens)
    attention = _attention(config, registry, target, chosen, model, context, kv)
    model.bind_attention(attention)
    return GreedyModel(
        model,
        attention,
        target.device,
        vocab_size=context.config.vocab_size,
        num_tokens=min(context.config.vocab_size, target.model_config.vocab_size),
        context_len=_context_len(context),
        max_rows=config.scheduling.max_running_requests,
        num_pages=kv.num_pages,
        page_size=kv.page_size,
    )


def _context(config: EngineConfig, target: Target, place: Path) -> ModelContext:
    """Return the context with which the draft model is created.

    Raises:
        ModelError: the checkpoint's configuration is wrong, or its vocabulary is not the served model's.
    """
    model_config = load_model_config(place)
    check_same_vocabulary(target.model_config, target.path, model_config, place)
    check_sizes(model_config, place)
    context_len = min(target.context_len, model_config.max_position_embeddings)
    code_folder = place if config.model.trust_remote_code else None
    return ModelContext(model_config, target.device, target.dtype, context_len, code_folder)


def _context_len(context: ModelContext) -> int:
    longest = context.config.max_position_embeddings
    return longest if context.context_len is None else context.context_len


def _loaded(
    config: EngineConfig,
    registry: Registry,
    context: ModelContext,
    place: Path,
    watcher: Callable[[str], None] | None,
) -> Model:
    """Create the model and load its weights.

    Raises:
        ModelError: the checkpoint cannot be read, or its model is not supported.
    """
    model: Model = registry.create("model", registry.model_for(context.config.architectures), {}, context)
    if not model.generates:
        raise ModelError(f"{place} cannot generate, because it has no output projection")
    if config.model.native_ops:  # must come before loading, since native kernels pack the weights
        bind_ops(model, choose_ops(context.device, context.dtype, user_cache_dir(os.environ)))
    with watch_reading(place, watcher) as on_read:
        model.load_weights(iter_weights(place, context.dtype, on_read=on_read))
    if config.model.prepack:
        model.pack_weights()
    return model


def _allocate(config: EngineConfig, target: Target, model: Model, kv_tokens: int) -> KVStore:
    """Allocate the KV memory.

    Raises:
        ConfigError: the device has too little memory.
    """
    page_size, layers = config.cache.page_size, model.attention_layers
    dtype = KV_DTYPES.get(config.memory.kv_dtype, target.dtype)
    token_bytes = KVStore.bytes_per_token(layers, dtype)
    num_pages = max(1, kv_tokens // page_size)
    num_bytes = num_pages * page_size * token_bytes
    place = _place(config, "kv_tokens")
    memory = DeviceMemory.read(target.device).shared_by(target.num_sharing)
    largest = f"{memory.free_bytes // max(1, page_size * token_bytes) * page_size:,}"
    check_room(num_bytes, memory, place, f"{num_pages * page_size:,} tokens of the draft model", largest)
    try:
        kv = KVStore(layers, num_pages, page_size, dtype, target.device)
    except (RuntimeError, MemoryError) as error:  # torch raises different errors for a full host and a full device
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{place}: {num_pages * page_size:,} tokens of the draft model cannot be allocated: {reason}"
        ) from error
    _logger.info(
        "KV memory of the draft model: %s tokens of %s bytes, %s",
        f"{num_pages * page_size:,}", f"{token_bytes:,}", gib(num_bytes),
    )  # fmt: skip
    return kv


def _attention(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    model: Model,
    context: ModelContext,
    kv: KVStore,
) -> AttentionBackend:
    """Create the attention backend, which is of the configured provider, or of the best that fits the draft model.

    Raises:
        ConfigError: the configured one does not fit the draft model.
    """
    try:
        provider = choose_attention(config, registry, target.platform, model, target.dtype)
    except ConfigError as error:
        raise ConfigError(f"{_place(config, 'path')}: the draft model cannot be used: {error}") from error
    attention: AttentionBackend = registry.create(
        "attention",
        provider,
        config.attention.options if provider is chosen.attention_provider else {},
        AttentionContext(
            layers=model.attention_layers,
            kv=kv,
            page_size=kv.page_size,
            device=target.device,
            dtype=target.dtype,
            max_requests=config.scheduling.max_running_requests,
            max_context_len=_context_len(context),
        ),
        config.origins,
    )
    return attention


def _place(config: EngineConfig, option: str) -> str:
    """Return the place in the configuration file, and the path, of an option."""
    path = (*_OPTIONS, option)
    return str(Problem(path, "", origin_of(path, config.origins)))
