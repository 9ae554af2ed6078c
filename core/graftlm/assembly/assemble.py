"""Assembles one engine from a configuration. The configured providers create the parts.

config ── Target ── ChosenPlugins ── ServedWeights ────── AllocatedKV ── DeviceParts ── StepLoop ── EngineParts
                                     AdapterParts         TierParts                     Grammars
                                     AssembledDrafters                                  Intake
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.assembly.adapters import AdapterParts, make_adapters
from graftlm.assembly.attention import make_attention
from graftlm.assembly.device_parts import make_device_parts
from graftlm.assembly.draft_checkpoint import check_draft_model
from graftlm.assembly.drafters import make_drafters
from graftlm.assembly.engine_parts import EngineParts
from graftlm.assembly.grammars import make_grammars
from graftlm.assembly.graphs import wants_graphs
from graftlm.assembly.kv_allocation import AllocatedKV, allocate_kv
from graftlm.assembly.loop import make_loop
from graftlm.assembly.media import MediaParts, make_media
from graftlm.assembly.plugin_choices import ChosenPlugins, check_choices, choose_plugins
from graftlm.assembly.resolved_plugins import ResolvedPlugins, resolved_line
from graftlm.assembly.target import Target
from graftlm.assembly.tiers import assemble_tiers
from graftlm.assembly.weight_loading import load_weights
from graftlm.chat.configured_tokenizer import load_tokenizer
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.contracts import Model, Platform
from graftlm.grammar.grammar_choice import Grammars
from graftlm.intake import Intake, IntakeLimits
from graftlm.layers.kernel_choice import choosing_kernels
from graftlm.observers import Observer
from graftlm.pooling.sentence_embedding import read_embedding_defaults
from graftlm.registry import Registry
from graftlm.runtime.kernel_events import kernels_reported
from graftlm.runtime.spare_core import SpareCore
from graftlm.tokenization import TextStream, Tokenizer

__all__ = ["assemble"]

_logger = logging.getLogger(__name__)


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
    """Create every part of an engine, and connect the parts.

    Args:
        on_stage: function that is called with the name of each stage, such as "loading weights"; None: progress is
            shown on a terminal.
        on_step: function that is called with every committed step, in addition to the plugins that observe steps.
        await_tokenizer: function that waits for the tokenizer and returns it; called after the slow stages. None: the
            tokenizer is read from the checkpoint.
        num_replicas: number of engines that share this machine's memory, including this one.

    Raises:
        GraftlmError: the subclass says which part failed, and the message says how to fix it.
    """
    with choosing_kernels(config.model.kernels), kernels_reported(on_terminal=on_stage is None):
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
    on_stage = watcher or _ignore
    on_stage("reading the checkpoint's configuration")
    check_choices(config, registry)
    path = resolve_checkpoint(config.model.path)
    model_config = load_model_config(path)
    if await_tokenizer is None:
        tokenizer = load_tokenizer(config, path)
    target = Target.of(config, platform, path, model_config, num_replicas)

    chosen = choose_plugins(config, registry, target)
    if watcher is None:  # in a server, the main process logs this line, with line numbers of the configuration file
        _logger.info("%s", resolved_line(chosen.resolved))

    check_draft_model(config, registry, model_config, path)
    weights = load_weights(config, registry, target, chosen, on_stage, watcher)
    media = make_media(config, registry, target, chosen, on_stage)
    adapters = make_adapters(config, chosen.model, target.num_sharing)
    drafters = make_drafters(config, registry, target, chosen, on_stage, watcher)
    if drafters.head is not None:
        chosen = replace(chosen, head=drafters.head.head)

    has_graphs = wants_graphs(
        config,
        chosen.attention_provider.capabilities,
        target.device,
        has_states=bool(chosen.model.state_layers),
    )
    kv = allocate_kv(config, registry, target, chosen, has_graphs=has_graphs, on_stage=on_stage)
    attention = make_attention(config, registry, target, chosen, kv.store, kv.memory.window)
    fingerprint = weights.fingerprint if drafters.head is None else drafters.head.fingerprint(weights.fingerprint)
    tiers = assemble_tiers(config, registry, kv.store, fingerprint, num_replicas)

    device_parts = make_device_parts(
        config,
        registry,
        target,
        chosen,
        kv,
        attention,
        tiers,
        adapters,
        media,
        has_graphs=has_graphs,
        on_stage=on_stage,
    )
    weights.set_graphs(device_parts.graphs)

    if await_tokenizer is not None:
        tokenizer = await_tokenizer()
    spare_core = SpareCore(time.monotonic, config.grammar.timeout_s)
    grammars = make_grammars(config, registry, tokenizer, model_config, spare_core)
    if grammars is not None and config.grammar.preload:
        grammars.preload()

    loop = make_loop(
        config, registry, target, kv, tiers, device_parts, tokenizer, grammars, spare_core, drafters, on_step, media
    )
    return EngineParts(
        config=config,
        model_config=model_config,
        tokenizer=tokenizer,
        intake=_intake(config, registry, target, chosen.model, kv, tokenizer, grammars, adapters),
        loop=loop,
        device=platform.device,
        dtype=target.dtype_name,
        embedding=read_embedding_defaults(path),
        weights=weights,
        device_parts=device_parts,
        adapters=None if adapters is None else AdapterLoader(loop, adapters.catalog, adapters.layers, adapters.read),
        resolved=_resolved(config, registry, chosen, media),
        media=media,
    )


def _intake(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    model: Model,
    kv: AllocatedKV,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
    adapters: AdapterParts | None,
) -> Intake:
    limits = IntakeLimits(
        vocab_size=target.model_config.vocab_size,
        context_len=target.context_len,
        memory_tokens=kv.memory.num_pages * config.cache.page_size,
        eos_token_ids=target.model_config.eos_token_ids,
        logits_processors=frozenset(registry.names("logits_processor")),
        generates=model.generates,
        num_labels=model.num_labels,
    )
    catalog = None if adapters is None else adapters.catalog
    return Intake(limits, lambda params: TextStream(tokenizer, params), time.monotonic, grammars, catalog)


def _resolved(
    config: EngineConfig, registry: Registry, chosen: ChosenPlugins, media: MediaParts | None
) -> ResolvedPlugins:
    if media is None:
        return chosen.resolved
    path = ("media", "name")
    why = f"media.name: {config.origins[path].source}" if path in config.origins else "auto: the checkpoint"
    found = {"name": media.provider.name, "distribution": registry.distribution(media.provider), "why": why}
    return chosen.resolved | {"media": found}


def _ignore(stage: str) -> None:
    """Do nothing."""
