"""Loads a draft model, which has its own KV memory."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from graftlm.assembly.device_memory import DeviceMemory, check_room, gib
from graftlm.assembly.draft_checkpoint import option_place, read_draft_checkpoint, unfit_draft_model
from graftlm.assembly.plugin_choices import ChosenPlugins, choose_attention
from graftlm.assembly.target import Target
from graftlm.checkpoint import (
    iter_weights,
    watch_reading,
)
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionBackend, AttentionContext, DraftModel, Model, ModelConfig, ModelContext
from graftlm.errors import ConfigError, ModelError
from graftlm.execution.greedy_model import GreedyModel
from graftlm.execution.kv_store import KVStore
from graftlm.layers import KV_DTYPES
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import bind_ops, choose_ops
from graftlm.registry import Registry

__all__ = ["DraftKVSize", "create_draft_model", "draft_model_context", "load_draft_model", "size_draft_kv"]

_logger = logging.getLogger(__name__)


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
        path: path of the draft model's checkpoint, in the forms that `model.path` may have.
        kv_tokens: size of the draft model's KV memory in tokens; whole pages are allocated.
        watcher: function that is called with the progress of reading; None: progress is shown on a terminal.

    Effects: logs the size of the KV memory.

    Raises:
        ConfigError: the checkpoint cannot be used or has another vocabulary, or the memory cannot be allocated. The
            message has the option's line in the configuration.
    """
    try:
        place, model_config = read_draft_checkpoint(path, target.model_config, target.path)
        context = draft_model_context(config, model_config, place, target.model_context)
        model = _loaded(config, registry, context, place, watcher)
    except ModelError as error:
        raise ConfigError(f"{option_place(config, 'path')}: {unfit_draft_model(error)}") from error
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


def draft_model_context(
    config: EngineConfig, model_config: ModelConfig, place: Path, served: ModelContext
) -> ModelContext:
    """Return the context for the creation of a draft model.

    Args:
        model_config, place: configuration and checkpoint path of the draft model.
        served: context of the served model.
    """
    longest = model_config.max_position_embeddings
    context_len = longest if served.context_len is None else min(served.context_len, longest)
    code_folder = place if config.model.trust_remote_code else None
    return ModelContext(model_config, served.device, served.dtype, context_len, code_folder)


def _context_len(context: ModelContext) -> int:
    longest = context.config.max_position_embeddings
    return longest if context.context_len is None else context.context_len


def create_draft_model(registry: Registry, context: ModelContext, place: Path) -> Model:
    """Create a draft model, without weights.

    Args:
        place: path of the draft model's checkpoint.

    Raises:
        ModelError: the model is not supported, cannot generate, or has a recurrent state.
    """
    model: Model = registry.create("model", registry.model_for(context.config.architectures), {}, context)
    if not model.generates:
        raise ModelError(f"{place} cannot generate, because it has no output projection")
    if model.state_layers:
        raise ModelError(f"{place} has a recurrent state, which draft models cannot have")
    return model


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
    model = create_draft_model(registry, context, place)
    if config.model.native_ops:  # before loading, because native kernels pack the weights when they are loaded
        bind_ops(model, choose_ops(context.device, context.dtype, user_cache_dir(os.environ)))
    with watch_reading(place, watcher) as on_read:
        model.load_weights(iter_weights(place, context.dtype, on_read=on_read))
    if config.model.prepack:
        model.pack_weights()
    return model


@dataclass(frozen=True, slots=True)
class DraftKVSize:
    """The size of a draft model's KV memory.

    `size_draft_kv` computes it; the start plan counts it, and `load_draft_model` allocates it.
    """

    num_pages: int
    page_size: int
    token_bytes: int
    dtype: torch.dtype

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit into the memory."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.num_tokens * self.token_bytes


def size_draft_kv(
    config: EngineConfig, model: Model, dtype: torch.dtype, kv_tokens: int, memory: DeviceMemory
) -> DraftKVSize:
    """Return the size of a draft model's KV memory. If it does not fit into the free memory, log a warning.

    Args:
        dtype: dtype in which the draft model computes.
        memory: this engine's share of the device's memory.

    Raises:
        ConfigError: the device has too little memory.
    """
    page_size, kv_dtype = config.cache.page_size, KV_DTYPES.get(config.memory.kv_dtype, dtype)
    token_bytes = KVStore.bytes_per_token(model.attention_layers, kv_dtype)
    size = DraftKVSize(max(1, kv_tokens // page_size), page_size, token_bytes, kv_dtype)
    largest = f"{memory.free_bytes // max(1, page_size * token_bytes) * page_size:,}"
    what = f"{size.num_tokens:,} tokens of the draft model"
    check_room(size.num_bytes, memory, option_place(config, "kv_tokens"), what, largest)
    return size


def _allocate(config: EngineConfig, target: Target, model: Model, kv_tokens: int) -> KVStore:
    """Allocate the draft model's KV memory.

    Raises:
        ConfigError: the device has too little memory.
    """
    memory = DeviceMemory.read(target.device).shared_by(target.num_sharing)
    size = size_draft_kv(config, model, target.dtype, kv_tokens, memory)
    try:
        kv = KVStore(model.attention_layers, size.num_pages, size.page_size, size.dtype, target.device)
    except (RuntimeError, MemoryError) as error:  # torch raises different errors for a full host and a full device
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{option_place(config, 'kv_tokens')}: {size.num_tokens:,} tokens of the draft model cannot be allocated: "
            f"{reason}"
        ) from error
    _logger.info(
        "KV memory of the draft model: %s tokens of %s bytes, %s",
        f"{size.num_tokens:,}", f"{size.token_bytes:,}", gib(size.num_bytes),
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
    """Create the attention backend: of the configured provider, or with "auto" the best that fits the draft model.

    Raises:
        ConfigError: the configured backend does not fit the draft model.
    """
    try:
        provider = choose_attention(config, registry, target.platform, model, target.dtype)
    except ConfigError as error:
        raise ConfigError(f"{option_place(config, 'path')}: {unfit_draft_model(error)}") from error
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
