"""Computes the output of `graftlm serve --dry-run`: the engine's parts and sizes, without loading weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from graftlm.assembly.device_memory import DeviceMemory, gib
from graftlm.assembly.draft_checkpoint import (
    draft_model_options,
    option_place,
    read_draft_checkpoint,
    unfit_draft_model,
)
from graftlm.assembly.draft_heads import HeadSource, plan_head
from graftlm.assembly.draft_models import create_draft_model, draft_model_context, size_draft_kv
from graftlm.assembly.kv_memory import KVMemory, size_memory
from graftlm.assembly.plugin_choices import choose_attention, create_model
from graftlm.assembly.resolved_plugins import resolve_plugins
from graftlm.assembly.step_memory import StepMemory
from graftlm.assembly.target import context_len_of
from graftlm.chat.chat_formats import choose_chat_formats
from graftlm.chat.configured_tokenizer import load_tokenizer
from graftlm.checkpoint import check_sizes, load_model_config, resolve_checkpoint, torch_dtype
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionLayer, DraftModelOptions, ModelContext, Platform, StateLayer
from graftlm.errors import ConfigError, ModelError
from graftlm.execution.kv_store import KVStore
from graftlm.registry import Registry

__all__ = ["plan_start"]


def plan_start(
    config: EngineConfig, registry: Registry, platform: Platform, device_memory: DeviceMemory | None = None
) -> list[str]:
    """Return a description of the engine that a configuration would start, as lines.

    This function reads the checkpoint's configuration and tokenizer, but no weights. It estimates the memory that is
    free after the weights are loaded. If the estimate is too small, a line contains a warning.

    Args:
        device_memory: the current memory of the device; None: it is read.

    Raises:
        GraftlmError: the engine would not start.
    """
    path = resolve_checkpoint(config.model.path)
    model_config = load_model_config(path)
    check_sizes(model_config, path)
    tokenizer = load_tokenizer(config, path)
    dtype = torch_dtype(config.model.dtype, model_config)
    context_len = context_len_of(config, model_config)
    provider = registry.model_for(model_config.architectures, config.model.architecture)
    code_folder = path if config.model.trust_remote_code else None
    context = ModelContext(model_config, torch.device("meta"), dtype, context_len, code_folder)
    model = create_model(config, registry, provider, context)
    weight_bytes = _weight_bytes(model)
    dtype_name = str(dtype).removeprefix("torch.")
    chosen = {"model": provider, **choose_chat_formats(config, registry, tokenizer.chat_template)}
    lines = [
        f"model: {path} ({', '.join(model_config.architectures)}), {gib(weight_bytes)} of weights"
        f"{' before they are quantized' if config.model.quantization.name else ''}, {dtype_name} on {platform.device}, "
        f"{config.parallel.data} replica(s), {context_len:,} tokens of context",
        f"tokenizer: {tokenizer.vocab_size:,} tokens, {'a' if tokenizer.has_chat_template else 'no'} chat template",
    ]
    device, num_sharing = torch.device(platform.device), config.parallel.data if platform.device == "cpu" else 1
    now = device_memory or DeviceMemory.read(device)
    options = draft_model_options(config, registry)
    if options is not None:
        free_bytes = max(0, now.free_bytes - num_sharing * weight_bytes)
        share = replace(now, free_bytes=free_bytes).shared_by(num_sharing)
        line, draft_bytes = _draft_model(config, registry, context, path, options, share)
        lines.append(line)
        weight_bytes += draft_bytes
    head = plan_head(config, registry, HeadSource(model, context, path, platform, None))
    if head is not None:
        head_bytes = _weight_bytes(head)
        lines.append(f"draft head: {type(head).__name__}, {gib(head_bytes)} of weights")
        weight_bytes += head_bytes
    try:
        chosen["attention"] = choose_attention(config, registry, platform, model, dtype)
        layers = [*model.attention_layers, *([] if head is None else [head.attention_layer])]
        states = model.state_layers
        lines.append(
            _memory_line(config, registry, device, layers, dtype, context_len, weight_bytes, now, num_sharing, states)
        )
    except ModelError:  # the layers are known only after a run with real weights
        lines.append("KV memory: not known before the model runs, because it does not describe its attention layers")
    resolved = resolve_plugins(
        config,
        registry,
        chosen,
        device=f"{platform.device}/{dtype_name}",
        chat_template=tokenizer.chat_template,
    )
    lines += [
        f"plugin: {family} = {one['name']} of {one['distribution']} ({one['why']})" for family, one in resolved.items()
    ]
    return lines


def _weight_bytes(model: object) -> int:
    """Return the size in bytes that the tensors of a model on the meta device would have.

    Return 0 for a model that is not a torch module, because its size is not known.
    """
    if not isinstance(model, nn.Module):
        return 0
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _draft_model(
    config: EngineConfig,
    registry: Registry,
    served: ModelContext,
    served_path: Path,
    options: DraftModelOptions,
    memory: DeviceMemory,
) -> tuple[str, int]:
    """Return a line about the draft model, and the size in bytes of its weights and KV memory together.

    Args:
        served, served_path: of the served model.
        memory: the estimated share of the device's memory after the served model is loaded.

    Raises:
        ConfigError: the draft model cannot be used, or its KV memory exceeds the device's memory.
    """
    try:
        place, model_config = read_draft_checkpoint(options.path, served.config, served_path)
        context = draft_model_context(config, model_config, place, served)
        model = create_draft_model(registry, context, place)
    except ModelError as error:
        raise ConfigError(f"{option_place(config, 'path')}: {unfit_draft_model(error)}") from error
    weight_bytes = _weight_bytes(model)
    line = f"draft model: {place} ({', '.join(model_config.architectures)}), {gib(weight_bytes)} of weights"
    left = replace(memory, free_bytes=max(0, memory.free_bytes - weight_bytes))
    try:
        kv = size_draft_kv(config, model, context.dtype, options.kv_tokens, left)
    except ModelError:  # the layers are known only after a run with real weights
        return f"{line}; its KV memory is not known before it runs", weight_bytes
    return (
        f"{line}, {gib(kv.num_bytes)} of KV memory: {kv.num_tokens:,} tokens of {kv.token_bytes:,} bytes",
        weight_bytes + kv.num_bytes,
    )


def _memory_line(
    config: EngineConfig,
    registry: Registry,
    device: torch.device,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
    context_len: int,
    weight_bytes: int,
    now: DeviceMemory,
    num_sharing: int,
    state_layers: Sequence[StateLayer],
) -> str:
    """Return a line with the size of the KV memory, from an estimate of the memory that the weights leave free.

    Args:
        weight_bytes: size in bytes of the weights, plus a draft model's weights and KV memory.

    Raises:
        ConfigError: the configured size exceeds the device's memory, or `memory.window_tokens` does not fit the model.
    """
    what = "weights" if draft_model_options(config, registry) is None else "weights and the draft model"
    after_loading = replace(now, free_bytes=max(0, now.free_bytes - num_sharing * weight_bytes))

    def size(available: DeviceMemory) -> KVMemory:
        steps = StepMemory()
        return size_memory(
            config, registry, layers, device, dtype, context_len, steps, num_sharing, available, state_layers
        )

    try:
        memory = size(after_loading)
    except ConfigError as error:
        size(replace(now, free_bytes=now.total_bytes))  # to raise errors that do not depend on the free memory
        weights = gib(num_sharing * weight_bytes)
        return (
            f"warning: KV memory: the estimated free memory is too small: the {what} need about {weights} of the "
            f"free {gib(now.free_bytes)} ({gib(now.total_bytes)} in total). If this is still true after they are "
            f"loaded, the start fails: {error}"
        )
    token_bytes = KVStore.bytes_per_token(layers, memory.dtype)
    share = after_loading.shared_by(num_sharing)
    line = (
        f"KV memory: {memory.num_pages * config.cache.page_size:,} tokens of {token_bytes:,} bytes; the {what} leave "
        f"about {gib(share.free_bytes)} free{' for each replica' if num_sharing > 1 else ''}"
    )
    if token_bytes == 0:  # the model has no attention layers
        return line
    return f"{line}, enough for {share.free_bytes // token_bytes:,} tokens, minus the memory of steps on a GPU"
