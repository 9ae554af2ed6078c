"""What an engine would be, found out without loading weights: for `graftlm serve --dry-run`."""

from dataclasses import replace

import torch
from torch import nn

from graftlm.assembly.device_memory import DeviceMemory, gib
from graftlm.assembly.kv_memory import KVMemory, size_memory
from graftlm.assembly.plugin_choices import choose_attention, create_model
from graftlm.assembly.resolved_plugins import resolve_plugins
from graftlm.assembly.step_memory import StepMemory
from graftlm.assembly.target import context_len_of
from graftlm.chat.chat_formats import choose_chat_formats
from graftlm.checkpoint import check_sizes, load_model_config, resolve_checkpoint, torch_dtype
from graftlm.config import EngineConfig
from graftlm.contracts import Model, ModelContext, Platform
from graftlm.errors import ConfigError, ModelError
from graftlm.execution.kv_store import KVStore
from graftlm.registry import Registry
from graftlm.tokenization import Tokenizer

__all__ = ["plan_start"]


def plan_start(
    config: EngineConfig, registry: Registry, platform: Platform, have: DeviceMemory | None = None
) -> list[str]:
    """Return what would start, line by line. Reads the checkpoint's configuration and tokenizer, no weights.

    What depends on the memory that is free once the weights are loaded is an estimate: too little is a warning.

    Args:
        have: the memory of the device now; None reads it.

    Raises:
        GraftlmError: the engine would not start.
    """
    path = resolve_checkpoint(config.model.path)
    model_config = load_model_config(path)
    check_sizes(model_config, path)
    tokenizer = Tokenizer.load(path, trust_remote_code=config.model.trust_remote_code)
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
    try:
        chosen["attention"] = choose_attention(config, registry, platform, model, dtype)
        lines.append(_memory_line(config, registry, platform, model, dtype, context_len, weight_bytes, have))
    except ModelError:  # the model can only be tried with numbers
        lines.append("KV memory: known when the model runs: it does not say what its layers keep")
    resolved = resolve_plugins(config, registry, chosen, f"{platform.device}/{dtype_name} and the checkpoint")
    lines += [
        f"plugin: {family} = {one['name']} of {one['distribution']} ({one['why']})" for family, one in resolved.items()
    ]
    return lines


def _weight_bytes(model: Model) -> int:
    """Return what the tensors of a model on the meta device would take, whatever its files hold besides.

    A model that is no module counts as nothing: only its files could tell, and they are not how it keeps its weights.
    """
    if not isinstance(model, nn.Module):
        return 0
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _memory_line(
    config: EngineConfig,
    registry: Registry,
    platform: Platform,
    model: Model,
    dtype: torch.dtype,
    context_len: int,
    weight_bytes: int,
    have: DeviceMemory | None,
) -> str:
    """Say how much KV memory there would be once the weights are loaded, by an estimate of what is free then.

    Raises:
        ConfigError: the configuration asks for more than the memory has, or for windows that the model has not.
    """
    device = torch.device(platform.device)
    now = have or DeviceMemory.read(device)
    sharing = config.parallel.data if platform.device == "cpu" else 1
    left = replace(now, free_bytes=max(0, now.free_bytes - sharing * weight_bytes))

    def size(have: DeviceMemory) -> KVMemory:
        return size_memory(config, registry, model, device, dtype, context_len, StepMemory(), sharing, have)

    try:
        memory = size(left)
    except ConfigError as error:
        size(replace(now, free_bytes=now.total_bytes))  # raises what does not depend on what is free
        weights = gib(sharing * weight_bytes)
        return (
            f"warning: KV memory: an estimate finds too little: the weights take about {weights} of the "
            f"{gib(now.free_bytes)} that are free ({gib(now.total_bytes)} in all). If that is still so when they are "
            f"loaded, the start fails: {error}"
        )
    token_bytes = KVStore.bytes_per_token(model.attention_layers, memory.dtype)
    mine = left.shared_by(sharing)
    return (
        f"KV memory: {memory.num_pages * config.cache.page_size:,} tokens of {token_bytes:,} bytes; beside the weights "
        f"{mine.free_bytes // token_bytes:,} would fit into the {gib(mine.free_bytes)} that are free"
        f"{' for each replica' if sharing > 1 else ''}, less what steps take on a GPU"
    )
