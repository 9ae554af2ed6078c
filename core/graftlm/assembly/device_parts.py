"""The parts of an engine that compute steps on the device."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graftlm.assembly.adapters import AdapterParts
from graftlm.assembly.graphs import capture_graphs, recorded_steps
from graftlm.assembly.kv_allocation import AllocatedKV
from graftlm.assembly.media import MediaParts
from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.target import Target
from graftlm.assembly.tiers import TierParts
from graftlm.config import EngineConfig
from graftlm.contracts import AttentionBackend, LogitsContext, LogitsProcessor, Model
from graftlm.errors import InvariantError
from graftlm.execution.awaiting_attention import AwaitingAttention
from graftlm.execution.graphs import ReplayedSteps
from graftlm.execution.head_steps import HeadSteps
from graftlm.execution.hidden_capture import HiddenCapture
from graftlm.execution.kv_store import KVStore
from graftlm.execution.native_masks import NativeMasks
from graftlm.execution.native_sampling import NativeSampling
from graftlm.execution.rank_samplers import FollowingSampler, LeadingSampler
from graftlm.execution.runner import ModelRunner
from graftlm.execution.sampler import Sampler, TokenSampler
from graftlm.execution.split_attention import SplitAttention
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.registry import Registry

__all__ = ["DeviceParts", "make_device_parts"]


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """The parts of an engine that compute steps.

    Attributes:
        model: the model with its weights.
        dtype: dtype in which the model computes; the dtype of `kv` may be smaller.
        attention: the attention backend.
        attention_name: name of the backend's provider.
        kv: the KV tensors.
        sampler: samples tokens from logits.
        runner: executes plans.
        graphs: replays steps with one token per request; None if every step runs without replay.
    """

    model: Model
    dtype: torch.dtype
    attention: AttentionBackend
    attention_name: str
    kv: KVStore
    sampler: Sampler
    runner: ModelRunner
    graphs: ReplayedSteps | None


def make_device_parts(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins,
    kv: AllocatedKV,
    attention: AttentionBackend,
    tiers: TierParts | None,
    adapters: AdapterParts | None,
    media: MediaParts | None = None,
    *,
    has_graphs: bool,
    on_stage: Callable[[str], None],
) -> DeviceParts:
    """Bind the attention backend to the model, and create the sampler, the graphs and the runner.

    Args:
        has_graphs: whether one-token steps are captured as CUDA graphs.
        on_stage: function that is called with the progress of capturing.
    """
    model, device = chosen.model, target.device
    model.bind_attention(attention if tiers is None else AwaitingAttention(attention, tiers.mover.await_layer))
    if kv.store.states is not None:
        model.bind_states(kv.store.states.tensors)
    sampler = _sampler(config, registry, target)
    head = _head(config, target, chosen, kv.store, attention)
    forward = model.forward if head is None else head[1].forward
    graphs: ReplayedSteps | None
    if has_graphs:
        graphs = capture_graphs(config, forward, attention, kv.store, kv.max_row_pages, on_stage)
    else:
        graphs = recorded_steps(
            config, model, forward, attention, device, has_adapters=adapters is not None, states=kv.store.states
        )
    runner = ModelRunner(
        model,
        attention,
        _shared(sampler, target),
        config.scheduling.max_running_requests,
        device,
        None if tiers is None else tiers.mover,
        graphs,
        None if adapters is None else adapters.layers,
        head=head,
        media=None if media is None else media.features,
    )
    return DeviceParts(
        model=model,
        dtype=target.dtype,
        attention=attention,
        attention_name=chosen.attention_provider.name,
        kv=kv.store,
        sampler=sampler,
        runner=runner,
        graphs=graphs,
    )


def _head(
    config: EngineConfig, target: Target, chosen: ChosenPlugins, kv: KVStore, attention: AttentionBackend
) -> tuple[HeadSteps, HiddenCapture] | None:
    """Return the draft head's steps, and the forward pass whose hidden states the head reads; None without a head.

    The head's layer has no window, so its backend needs no page table of sliding-window layers.
    """
    head = chosen.head
    if head is None:
        return None
    records = config.execution.graphs == "auto"
    own = attention.full if isinstance(attention, SplitAttention) else attention
    if own is None:
        raise InvariantError("no attention backend was made for the draft head")
    steps = HeadSteps(head, own, kv, config.scheduling.max_running_requests, target.dtype, records=records)
    return steps, HiddenCapture(chosen.model, head.hidden_layers)


def _shared(sampler: Sampler, target: Target) -> TokenSampler:
    """Return a sampler with which rank 0 samples for all ranks; with a single rank, the sampler itself."""
    parallel = target.parallel
    if parallel.communicator is None:
        return sampler
    if parallel.rank > 0:
        return FollowingSampler(parallel.communicator, target.device)
    return LeadingSampler(sampler, parallel.communicator)


def _sampler(config: EngineConfig, registry: Registry, target: Target) -> Sampler:
    masks, sampling = None, None
    if config.model.native_ops and target.device.type == "cpu":
        kernels = user_cache_dir(os.environ)
        masks, sampling = NativeMasks.load("g++", kernels), NativeSampling.load("g++", kernels)

    def make_processor(name: str, options: Mapping[str, Any], context: LogitsContext) -> LogitsProcessor:
        provider = registry.provider("logits_processor", name)
        processor: LogitsProcessor = registry.create("logits_processor", provider, options, context)
        return processor

    num_rows, vocab_size = config.scheduling.max_running_requests, target.model_config.vocab_size
    return Sampler(num_rows, vocab_size, target.device, make_processor, masks, sampling)
