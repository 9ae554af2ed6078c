"""Chooses the providers of the model and of attention, and creates the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graftlm.assembly.resolved_plugins import ResolvedPlugins, resolve_plugins
from graftlm.assembly.target import Target
from graftlm.checkpoint import check_sizes
from graftlm.config import EngineConfig
from graftlm.contracts import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionLayer,
    DraftHead,
    Model,
    ModelContext,
    Platform,
    Provider,
)
from graftlm.errors import ConfigError, UnsupportedArchitectureError
from graftlm.registry import AUTO, Registry, selections

__all__ = ["ChosenPlugins", "attention_misfit", "check_choices", "choose_attention", "choose_plugins", "create_model"]


@dataclass(frozen=True, slots=True)
class ChosenPlugins:
    """The providers that fit the checkpoint and the device.

    `choose_plugins` returns them; the later stages of the assembly create the plugins' objects.

    Attributes:
        model: the model, without weights.
        model_provider: the provider that created it.
        attention_provider: the provider of the attention backend.
        resolved: the chosen provider of each family, and the reason.
        head: the draft head of the model, set after the weights are loaded; None without a head.
    """

    model: Model
    model_provider: Provider[Model]
    attention_provider: Provider[AttentionBackend]
    resolved: ResolvedPlugins
    head: DraftHead | None = None

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """The attention layers of the model and of the draft head, in order of layer_id."""
        return (*self.model.attention_layers, *(() if self.head is None else (self.head.attention_layer,)))


def check_choices(config: EngineConfig, registry: Registry) -> None:
    """Check the names and options of all configured providers, before the weights are read.

    Raises:
        ConfigError: a provider or an option is unknown, or an option has a wrong value.
    """
    for selection in selections(config):
        family = selection.family
        if selection.name == AUTO:
            continue  # `auto` is resolved later, when the model is known
        provider = registry.provider(family.key, selection.name, family.name_path)
        if family.options_path is not None:
            registry.options(provider, selection.options, family.options_path, config.origins)


def choose_plugins(config: EngineConfig, registry: Registry, target: Target) -> ChosenPlugins:
    """Choose the providers of the model and of attention, and create the model without weights.

    Raises:
        GraftlmError: no provider fits, or the configured provider does not fit.
    """
    model_config = target.model_config
    model_provider = registry.model_for(model_config.architectures, config.model.architecture)
    check_sizes(model_config, target.path)
    model = create_model(config, registry, model_provider, target.model_context)
    attention_provider = choose_attention(config, registry, target.platform, model, target.dtype)
    chosen = {"model": model_provider, "attention": attention_provider}
    resolved = resolve_plugins(config, registry, chosen, device=f"{target.platform.device}/{target.dtype_name}")
    return ChosenPlugins(model, model_provider, attention_provider, resolved)


def create_model(config: EngineConfig, registry: Registry, provider: Provider[Model], context: ModelContext) -> Model:
    """Create the model, without weights.

    Raises:
        UnsupportedArchitectureError: the provider does not support the checkpoint. The message has the configuration
            key if the provider is configured.
    """
    try:
        model: Model = registry.create("model", provider, {}, context)
    except UnsupportedArchitectureError as error:
        name = config.model.architecture
        if name == AUTO:
            raise
        raise UnsupportedArchitectureError(
            f"model.architecture is {name!r}, which does not support this checkpoint: {error}. Set "
            "model.architecture: auto"
        ) from error
    return model


def choose_attention(
    config: EngineConfig, registry: Registry, platform: Platform, model: Model, dtype: torch.dtype
) -> Provider[AttentionBackend]:
    """Return the provider of the attention backend for a model.

    Raises:
        ConfigError: the configured provider does not fit.
        PluginError: no provider fits.
    """

    def misfit(provider: Provider[AttentionBackend]) -> str | None:
        return attention_misfit(provider.capabilities, config, platform, model.attention_layers, dtype)

    name = config.attention.name
    if name == "auto":
        return registry.choose("attention", fits=misfit)
    provider: Provider[AttentionBackend] = registry.provider("attention", name)
    reason = misfit(provider)
    if reason is not None:
        raise ConfigError(f"attention backend {name!r} does not fit this engine: {reason}. Set attention.name.")
    return provider


def attention_misfit(
    can: AttentionCapabilities,
    config: EngineConfig,
    platform: Platform,
    layers: Sequence[AttentionLayer],
    dtype: torch.dtype,
) -> str | None:
    """Return why an attention backend does not support a model's layers on a platform; None if it does."""
    dtype_name = str(dtype).removeprefix("torch.")
    page_size, kv_dtype = config.cache.page_size, config.memory.kv_dtype
    if platform.device not in can.devices:
        return f"it runs on {', '.join(can.devices)}, but the device is {platform.device}"
    if can.dtypes is not None and dtype_name not in can.dtypes:
        return f"it computes in {', '.join(can.dtypes)}, but the model computes in {dtype_name}"
    if can.page_sizes is not None and page_size not in can.page_sizes:
        return f"it supports page sizes {', '.join(map(str, can.page_sizes))}, but cache.page_size is {page_size}"
    if kv_dtype not in ("auto", *can.kv_dtypes):
        readable = " or ".join(("the model's dtype", *can.kv_dtypes))
        return f"it supports a KV cache in {readable}, but memory.kv_dtype is {kv_dtype}"
    head_dims = sorted({layer.head_dim for layer in layers} - set(can.head_dims or ()))
    if can.head_dims is not None and head_dims:
        return f"it supports head dims {', '.join(map(str, can.head_dims))}, but the model has {head_dims[0]}"
    if not can.sliding_window and any(layer.sliding_window is not None for layer in layers):
        return "it does not support sliding windows, which the model needs"
    if not can.soft_cap and any(layer.soft_cap is not None for layer in layers):
        return "it does not support a soft cap, which the model needs"
    if not can.value_prefix and any(layer.value_prefix_dim is not None for layer in layers):
        return "it cannot use a part of the keys as values, which the model's latent attention needs"
    if not can.sinks and any(layer.sinks is not None for layer in layers):
        return "it does not support attention sinks, which the model needs"
    return None
