"""From a configuration to the parts of one engine, each made by the provider that the configuration names."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.assembly.adapters import make_adapters
from graftlm.assembly.cache_events import CacheEvents
from graftlm.assembly.grammars import make_grammars
from graftlm.assembly.graphs import capture_graphs, captured_sizes, recorded_steps, wants_graphs
from graftlm.assembly.kv_memory import KVMemory, size_memory
from graftlm.assembly.quantization import quantize_layers
from graftlm.assembly.resolved_plugins import ResolvedPlugins, resolve_plugins, resolved_line
from graftlm.assembly.served_weights import NewWeights, ServedWeights
from graftlm.assembly.step_memory import LargestSteps, StepMemory, measure_steps, meter_for
from graftlm.assembly.tiers import TierParts, assemble_tiers
from graftlm.checkpoint import check_sizes, load_model_config, resolve_checkpoint, torch_dtype
from graftlm.config import EngineConfig
from graftlm.contracts import (
    AttentionBackend,
    AttentionCapabilities,
    AttentionContext,
    AttentionLayer,
    CacheContext,
    EvictionContext,
    LogitsContext,
    LogitsProcessor,
    Model,
    ModelConfig,
    ModelContext,
    Platform,
    PrefixCache,
    Provider,
    SchedulingContext,
)
from graftlm.errors import ConfigError, RequestError, UnsupportedArchitectureError
from graftlm.execution.awaiting_attention import AwaitingAttention
from graftlm.execution.executor import executor_for
from graftlm.execution.graphs import ReplayedSteps
from graftlm.execution.kv_store import KVStore
from graftlm.execution.native_masks import NativeMasks
from graftlm.execution.native_sampling import NativeSampling
from graftlm.execution.runner import ModelRunner
from graftlm.execution.sampler import Sampler
from graftlm.execution.spare_core_runner import SpareCoreRunner
from graftlm.execution.split_attention import SplitAttention
from graftlm.intake import Intake, IntakeLimits
from graftlm.layers.kernel_build import user_cache_dir
from graftlm.layers.ops import bind_ops, choose_ops
from graftlm.memory import (
    KVManager,
    LowerTiers,
    PagePool,
    RequestTable,
    WindowPages,
)
from graftlm.observers import Observer, Observers
from graftlm.pooling.sentence_embedding import EmbeddingDefaults, read_embedding_defaults
from graftlm.registry import AUTO, Registry, selections
from graftlm.runtime.kernel_events import kernels_reported
from graftlm.runtime.spare_core import SpareCore
from graftlm.scheduling import JumpForward, Scheduler, SchedulerLimits
from graftlm.step_loop import StepLoop
from graftlm.tokenization import TextStream, Tokenizer
from graftlm.types import SamplingParams

__all__ = [
    "DeviceParts",
    "EngineParts",
    "assemble",
    "attention_misfit",
    "choose_attention",
    "context_len_of",
    "create_model",
    "detect_platform",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceParts:
    """What one step runs through.

    Attributes:
        dtype: of the model; `kv` may hold fewer bits.
        attention_name: of the provider of `attention`.
        graphs: what replays one-token steps; None where the model runs every step.
    """

    model: Model
    dtype: torch.dtype
    attention: AttentionBackend
    attention_name: str
    kv: KVStore
    sampler: Sampler
    runner: ModelRunner
    graphs: ReplayedSteps | None


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An assembled engine, without a thread of its own.

    Attributes:
        embedding: how the checkpoint's embeddings are made.
        weights: of the model, and how they change.
        device_parts: what its steps run on, for tools that run steps of their own while the loop runs none.
        adapters: loads and unloads adapters; None where requests can have none.
        resolved: which provider each family has, and why.
    """

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer
    intake: Intake
    loop: StepLoop
    device: str
    dtype: str
    embedding: EmbeddingDefaults
    weights: ServedWeights
    device_parts: DeviceParts
    adapters: AdapterLoader | None = None
    resolved: ResolvedPlugins = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return what another process must know of this engine, as plain data; `limits` makes an IntakeLimits."""
        limits = asdict(self.intake.limits) | {"logits_processors": sorted(self.intake.limits.logits_processors)}
        kv = self.loop.scheduler.kv
        loaded = {} if self.adapters is None else self.adapters.loaded
        return {
            "limits": limits,
            "architectures": self.model_config.architectures,
            "device": self.device,
            "dtype": self.dtype,
            "kv_dtype": str(self.device_parts.kv.dtype).removeprefix("torch."),
            "page_size": kv.page_size,
            "num_pages": kv.pool.num_pages,
            "adapters": {name: it.digest for name, it in loaded.items()},
            "resolved": self.resolved,
        }

    def replace_weights(self, new: NewWeights, *, flush_cache: bool) -> None:
        """Replace the model's weights between two steps.

        Args:
            new: as `weights` has checked them.
            flush_cache: give up all keys and values, which the former weights made; requests that run, or are paused,
                are computed again. False keeps them in use.

        Raises:
            RequestError: the cache has tiers below the device's memory, which only hold keys and values of one model.
            EngineError: copying failed halfway.
        """
        if not flush_cache and self.loop.scheduler.kv.tiers is not None:
            raise RequestError("flush_cache must be true: the cache's tiers would keep what the old weights made")
        self.loop.change_model(lambda: self.weights.replace(new), keep_memory=not flush_cache)

    def read_weight(self, name: str) -> torch.Tensor:
        """Return a copy of a weight, on the CPU, between two steps; raises as `ServedWeights.read`."""
        found: list[torch.Tensor] = []
        self.loop.run_on_device(lambda: found.append(self.weights.read(name)))
        return found[0]

    def text_stream(self, params: SamplingParams) -> TextStream:
        """Return a fresh detokeniser of one completion."""
        return TextStream(self.tokenizer, params)


def detect_platform(config: EngineConfig) -> Platform:
    """Return the device that the configuration asks for, as it is.

    Raises:
        ConfigError: it asks for a CUDA device and there is none.
    """
    wanted = config.model.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return Platform("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda', but torch sees no CUDA device. Set model.device: auto.")
    return Platform("cuda", torch.cuda.get_device_capability())


def assemble(
    config: EngineConfig,
    registry: Registry,
    platform: Platform,
    *,
    on_stage: Callable[[str], None] | None = None,
    on_step: Observer | None = None,
    await_tokenizer: Callable[[], Tokenizer] | None = None,
    num_replicas: int = 1,
) -> EngineParts:
    """Create every part. The only place where parts learn of each other.

    Args:
        on_stage: hears what is being done, such as "loading weights"; None: a terminal shows how far that is.
        on_step: hears of every committed step, besides the plugins that observe steps.
        await_tokenizer: returns the tokenizer, when all else that takes long is done; None: it is the checkpoint's.
        num_replicas: engines that share this machine's memory, this one among them.

    Raises:
        GraftlmError: the leaf says which part, and what to do.
    """
    with kernels_reported(on_terminal=on_stage is None):
        return _assemble(config, registry, platform, on_stage, on_step, await_tokenizer, num_replicas)


def _assemble(
    config: EngineConfig,
    registry: Registry,
    platform: Platform,
    watcher: Callable[[str], None] | None,
    on_step: Observer | None,
    await_tokenizer: Callable[[], Tokenizer] | None,
    num_replicas: int,
) -> EngineParts:
    on_stage = watcher or _tell_nobody
    on_stage("reading the checkpoint's configuration")
    _check_choices(config, registry)
    path = resolve_checkpoint(config.model.path)
    model_config = load_model_config(path)
    if await_tokenizer is None:
        tokenizer = Tokenizer.load(path, trust_remote_code=config.model.trust_remote_code)
    target = _Target(
        device=torch.device(platform.device),
        dtype=torch_dtype(config.model.dtype, model_config),
        context_len=context_len_of(config, model_config),
    )
    model_provider = registry.model_for(model_config.architectures, config.model.architecture)
    code_folder = path if config.model.trust_remote_code else None
    check_sizes(model_config, path)
    model_context = ModelContext(model_config, target.device, target.dtype, target.context_len, code_folder)
    model = create_model(config, registry, model_provider, model_context)
    attention_provider = choose_attention(config, registry, platform, model, target.dtype)
    dtype = str(target.dtype).removeprefix("torch.")
    chosen = {"model": model_provider, "attention": attention_provider}
    resolved = resolve_plugins(config, registry, chosen, f"{platform.device}/{dtype}")
    if watcher is None:  # the server's main process logs it, with the lines of the configuration file
        _logger.info("%s", resolved_line(resolved))
    quantized = quantize_layers(config, registry, model, target.device, target.dtype)
    on_stage("loading weights")
    twin_context = replace(model_context, device=torch.device("meta"))
    weights = ServedWeights(
        config,
        model,
        model_config,
        lambda: registry.create("model", model_provider, {}, twin_context),
        quantized,
        path,
        target.dtype,
    )
    if config.model.native_ops:  # before the weights come: it is also how they are packed
        bind_ops(model, choose_ops(target.device, target.dtype, user_cache_dir(os.environ)))
    weights.load(watcher)
    adapters = make_adapters(config, model, num_replicas if target.device.type == "cpu" else 1)

    has_graphs = wants_graphs(config, attention_provider.capabilities, target.device)
    on_stage("measuring steps")
    steps = _measure_steps(
        config,
        model,
        target,
        has_graphs,
        lambda kv: _attention(config, registry, attention_provider, model, target, kv),
    )
    on_stage("allocating KV memory")
    sharing = num_replicas if target.device.type == "cpu" else 1  # on GPUs each has a device of its own
    memory = size_memory(config, registry, model, target.device, target.dtype, target.context_len, steps, sharing)
    kv = _kv_store(config, model, memory, target.device, spare_pages=int(has_graphs))
    attention = _attention(config, registry, attention_provider, model, target, kv, memory.window)
    tiers = assemble_tiers(config, registry, kv, weights.fingerprint, num_replicas)
    model.bind_attention(attention if tiers is None else AwaitingAttention(attention, tiers.mover.await_layer))
    num_rows = config.scheduling.max_running_requests
    masks, sampling = None, None
    if config.model.native_ops and target.device.type == "cpu":
        kernels = user_cache_dir(os.environ)
        masks, sampling = NativeMasks.load("g++", kernels), NativeSampling.load("g++", kernels)
    sampler = Sampler(num_rows, model_config.vocab_size, target.device, _processor_factory(registry), masks, sampling)
    mover = None if tiers is None else tiers.mover
    max_pages = min(memory.num_pages, -(-target.context_len // config.cache.page_size))
    adapter_layers = None if adapters is None else adapters.layers
    graphs: ReplayedSteps | None
    if has_graphs:
        graphs = capture_graphs(config, model, attention, kv, max_pages, on_stage)
    else:
        graphs = recorded_steps(config, model, attention, target.device, has_adapters=adapters is not None)
    weights.captured_in(graphs)
    runner = ModelRunner(model, attention, sampler, num_rows, target.device, mover, graphs, adapter_layers)

    if await_tokenizer is not None:
        tokenizer = await_tokenizer()
    spare_core = SpareCore(time.monotonic, config.grammar.timeout_s)
    grammars = make_grammars(config, registry, tokenizer, model_config, spare_core)
    if grammars is not None and config.grammar.preload:
        grammars.preload()
    make_cache = _cache_factory(config, registry, memory, tiers)
    jump_forward = JumpForward(tokenizer) if config.grammar.jump_forward else None
    loop = StepLoop(
        _scheduler(config, registry, make_cache(), memory, max_pages, tiers, jump_forward),
        executor_for(
            SpareCoreRunner(runner, spare_core) if target.device.type == "cpu" else runner,
            target.device.type,
            overlap=config.scheduling.overlap,
        ),
        overlap=config.scheduling.overlap,
        make_cache=make_cache,
        observers=Observers(
            registry.observers("request_finished"),
            registry.observers("step_finished") + (() if on_step is None else (on_step,)),
        ),
        clock=time.monotonic,
        mover=mover,
        grammars=grammars,
        debug=config.debug,
    )
    limits = IntakeLimits(
        vocab_size=model_config.vocab_size,
        context_len=target.context_len,
        memory_tokens=memory.num_pages * config.cache.page_size,
        eos_token_ids=model_config.eos_token_ids,
        logits_processors=frozenset(registry.names("logits_processor")),
        generates=model.generates,
        num_labels=model.num_labels,
    )
    catalog = None if adapters is None else adapters.catalog
    intake = Intake(limits, lambda params: TextStream(tokenizer, params), time.monotonic, grammars, catalog)
    device_parts = DeviceParts(model, target.dtype, attention, attention_provider.name, kv, sampler, runner, graphs)
    loader = None if adapters is None else AdapterLoader(loop, adapters.catalog, adapters.layers, adapters.read)
    embedding = read_embedding_defaults(path)
    return EngineParts(
        config,
        model_config,
        tokenizer,
        intake,
        loop,
        platform.device,
        dtype,
        embedding,
        weights,
        device_parts,
        loader,
        resolved,
    )


def _tell_nobody(stage: str) -> None:
    """Nobody wants to hear what is being done."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where the model runs, in what, and how far.

    Attributes:
        context_len: tokens of a request at most.
    """

    device: torch.device
    dtype: torch.dtype
    context_len: int


def context_len_of(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the tokens of a request at most.

    Raises:
        ConfigError: the configuration wants more than the checkpoint has.
    """
    wanted, longest = config.model.context_len, model_config.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise ConfigError(f"model.context_len is {wanted}, but this checkpoint's context ends at {longest} tokens")
    return longest if wanted is None else wanted


def _check_choices(config: EngineConfig, registry: Registry) -> None:
    """Find wrong names and options before the weights are read, which takes a while."""
    for selection in selections(config):
        family = selection.family
        if selection.name == AUTO:
            continue  # chosen when the model is known
        provider = registry.provider(family.key, selection.name, family.name_path)
        if family.options_path is not None:
            registry.options(provider, selection.options, family.options_path, config.origins)


def _measure_steps(
    config: EngineConfig,
    model: Model,
    target: _Target,
    has_graphs: bool,
    make_attention: Callable[[KVStore], AttentionBackend],
) -> StepMemory:
    """Measure what steps take of a device where KV memory is to be as large as that allows."""
    meter = meter_for(target.device)
    if meter is None or config.memory.kv_tokens is not None:
        return StepMemory()
    steps = LargestSteps(
        num_rows=config.scheduling.max_running_requests,
        prefill_tokens=config.scheduling.prefill_tokens_per_step,
        context_len=target.context_len,
        page_size=config.cache.page_size,
        graph_sizes=captured_sizes(config) if has_graphs else (),
    )
    return measure_steps(steps, model, make_attention, target.dtype, target.device, meter)


def _kv_store(
    config: EngineConfig, model: Model, memory: KVMemory, device: torch.device, *, spare_pages: int
) -> KVStore:
    """Take the memory of keys and values.

    Raises:
        ConfigError: the device does not give it: others hold too much of it.
    """
    num_window_pages = None if memory.window is None else memory.window.num_window_pages
    page_size = config.cache.page_size
    try:
        return KVStore(
            model.attention_layers, memory.num_pages, page_size, memory.dtype, device, num_window_pages, spare_pages
        )
    except (RuntimeError, MemoryError) as error:  # torch has its own errors for a host and for a device without room
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{memory.num_pages * page_size:,} tokens of KV memory cannot be allocated: {reason}. Lower "
            "memory.kv_tokens or memory.kv_fraction, or free memory."
        ) from error


def _attention(
    config: EngineConfig,
    registry: Registry,
    provider: Provider[AttentionBackend],
    model: Model,
    target: _Target,
    kv: KVStore,
    window: WindowPages | None = None,
) -> AttentionBackend:
    """Create the attention backend over the KV tensors; one for each of two memories."""
    page_size, layers = config.cache.page_size, model.attention_layers
    context = AttentionContext(
        layers=layers,
        kv=kv,
        page_size=page_size,
        device=target.device,
        dtype=target.dtype,
        max_requests=config.scheduling.max_running_requests,
        max_context_len=target.context_len,
    )

    def create() -> AttentionBackend:
        backend: AttentionBackend = registry.create(
            "attention", provider, config.attention.options, context, config.origins
        )
        return backend

    if window is None:
        return create()
    has_full = any(layer.sliding_window is None for layer in layers)
    return SplitAttention(create() if has_full else None, create())


def _scheduler(
    config: EngineConfig,
    registry: Registry,
    cache: PrefixCache,
    memory: KVMemory,
    max_pages: int,
    tiers: TierParts | None,
    jump_forward: JumpForward | None,
) -> Scheduler:
    settings, page_size = config.scheduling, config.cache.page_size
    table = RequestTable(settings.max_running_requests, max_pages)
    lower = None if tiers is None else LowerTiers(cache, tiers.queue)
    kv = KVManager(PagePool(memory.num_pages), cache, table, page_size, memory.window, lower)
    provider = registry.provider("scheduling", settings.policy.name)
    policy = registry.create("scheduling", provider, settings.policy.options, SchedulingContext(), config.origins)
    limits = SchedulerLimits(settings.max_queued_requests, settings.prefill_tokens_per_step, settings.mix_chunks)
    return Scheduler(kv, policy, limits, time.monotonic, jump_forward)


def create_model(config: EngineConfig, registry: Registry, provider: Provider[Model], context: ModelContext) -> Model:
    """Create the model, without weights.

    Raises:
        UnsupportedArchitectureError: it does not serve the checkpoint; the message tells if the configuration named it.
    """
    try:
        model: Model = registry.create("model", provider, {}, context)
    except UnsupportedArchitectureError as error:
        name = config.model.architecture
        if name == AUTO:
            raise
        raise UnsupportedArchitectureError(
            f"model.architecture is {name!r}, which does not serve this checkpoint: {error}. "
            "Set model.architecture: auto"
        ) from error
    return model


def choose_attention(
    config: EngineConfig, registry: Registry, platform: Platform, model: Model, dtype: torch.dtype
) -> Provider[AttentionBackend]:
    """Return the provider of the attention backend for a model.

    Raises:
        ConfigError: the configured one does not fit.
        PluginError: there is none.
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
    """Say why a backend cannot serve a model's layers on a platform, or return None."""
    dtype_name = str(dtype).removeprefix("torch.")
    page_size, kv_dtype = config.cache.page_size, config.memory.kv_dtype
    if platform.device not in can.devices:
        return f"it runs on {', '.join(can.devices)}, the device is {platform.device}"
    if can.dtypes is not None and dtype_name not in can.dtypes:
        return f"it computes in {', '.join(can.dtypes)}, the model in {dtype_name}"
    if can.page_sizes is not None and page_size not in can.page_sizes:
        return f"it takes page sizes {', '.join(map(str, can.page_sizes))}, cache.page_size is {page_size}"
    if kv_dtype not in ("auto", *can.kv_dtypes):
        readable = " or ".join(("the model's dtype", *can.kv_dtypes))
        return f"it reads a KV cache of {readable}, memory.kv_dtype is {kv_dtype}"
    head_dims = sorted({layer.head_dim for layer in layers} - set(can.head_dims or ()))
    if can.head_dims is not None and head_dims:
        return f"it takes head dims {', '.join(map(str, can.head_dims))}, the model has {head_dims[0]}"
    if not can.sliding_window and any(layer.sliding_window is not None for layer in layers):
        return "it has no sliding window, the model needs one"
    if not can.soft_cap and any(layer.soft_cap is not None for layer in layers):
        return "it has no soft cap, the model needs one"
    if not can.value_prefix and any(layer.value_prefix_dim is not None for layer in layers):
        return "it cannot read values out of the keys, as the model's latent attention needs"
    if not can.sinks and any(layer.sinks is not None for layer in layers):
        return "it has no attention sinks, the model needs them"
    return None


def _cache_factory(
    config: EngineConfig, registry: Registry, memory: KVMemory, tiers: TierParts | None
) -> Callable[[], PrefixCache]:
    """Return what makes a fresh prefix cache with a fresh eviction strategy."""
    settings = config.cache
    events = CacheEvents(registry.observers("cache_event"))

    def create(tiers: TierParts | None) -> PrefixCache:
        eviction = registry.create(
            "eviction",
            registry.provider("eviction", settings.eviction.name),
            settings.eviction.options,
            EvictionContext(memory.num_pages, settings.page_size),
            config.origins,
        )
        context = CacheContext(
            settings.page_size,
            eviction,
            time.monotonic,
            events.listener,
            window=memory.window,
            transfer=None if tiers is None else tiers.queue,
            create_storage=None if tiers is None else tiers.create_storage,
        )
        cache: PrefixCache = registry.create(
            "cache", registry.provider("cache", settings.name), settings.options, context
        )
        return cache

    num_made = 0

    def make() -> PrefixCache:
        nonlocal num_made
        num_made += 1
        if num_made > 1:
            events.clear()
        if num_made == 1 or tiers is None:
            return create(tiers)
        try:
            return create(tiers)
        except Exception:
            _logger.exception("the prefix cache cannot have host memory or storage again: it goes on without")
            return create(None)

    return make


def _processor_factory(registry: Registry) -> Callable[[str, Mapping[str, Any], LogitsContext], LogitsProcessor]:
    def make(name: str, options: Mapping[str, Any], context: LogitsContext) -> LogitsProcessor:
        provider = registry.provider("logits_processor", name)
        processor: LogitsProcessor = registry.create("logits_processor", provider, options, context)
        return processor

    return make
