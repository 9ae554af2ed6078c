"""Loads the weights of a model during assembly."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.quantization import quantize_layers
from graftlm.assembly.served_weights import ServedWeights
from graftlm.assembly.target import Target
from graftlm.config import EngineConfig
from graftlm.contracts import Model
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import bind_ops, choose_ops
from graftlm.layers.state_ops import bind_state_ops, choose_state_ops
from graftlm.registry import Registry

__all__ = ["load_weights"]


def load_weights(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
) -> ServedWeights:
    """Load the checkpoint's weights into the model, and quantize them if this is configured.

    Args:
        on_stage: function that is called with the name of the stage.
        watcher: called with the progress of reading; None: progress is shown on a terminal.

    Raises:
        GraftlmError: the checkpoint does not fit the model, cannot be quantized or cannot be read.
    """
    model = chosen.model
    quantized = quantize_layers(config, registry, model, target.device, target.dtype)
    on_stage("loading weights")
    meta_context = replace(target.model_context, device=torch.device("meta"))

    def make_meta_model() -> Model:
        meta_model: Model = registry.create("model", chosen.model_provider, {}, meta_context)
        return meta_model

    weights = ServedWeights(config, model, target.model_config, make_meta_model, quantized, target.path, target.dtype)
    if config.model.native_ops:  # before loading, because native kernels pack the weights when they are loaded
        bind_ops(model, choose_ops(target.device, target.dtype, user_cache_dir(os.environ)))
        if model.state_layers:
            bind_state_ops(model, choose_state_ops(target.device, user_cache_dir(os.environ)))
    weights.load(watcher)
    return weights
