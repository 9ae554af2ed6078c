"""Assembles one engine from a configuration. The configured providers create the parts.

config ── Target ── ChosenPlugins ── ServedWeights ────── AllocatedKV ── DeviceParts ── StepLoop ── EngineParts
                                     AdapterParts         TierParts                     Grammars
                                     AssembledDrafters                                  Intake
"""

import logging
import time
from collections.abc import Callable

from graftlm.assembly.adapter_loading import AdapterLoader
from graftlm.assembly.device_side import DeviceSide, load_device
from graftlm.assembly.draft_checkpoint import check_draft_model
from graftlm.assembly.engine_parts import EngineParts
from graftlm.assembly.grammars import make_grammars
from graftlm.assembly.loop import make_loop
from graftlm.assembly.plugin_choices import check_choices, choose_plugins
from graftlm.assembly.rank_start import start_ranks
from graftlm.assembly.resolved_plugins import resolved_line
from graftlm.assembly.target import Target
from graftlm.chat.configured_tokenizer import load_tokenizer
from graftlm.checkpoint import load_model_config, resolve_checkpoint
from graftlm.config import EngineConfig
from graftlm.contracts import Platform
from graftlm.grammar.grammar_choice import Grammars
from graftlm.intake import Intake, IntakeLimits
from graftlm.layers.kernel_choice import choosing_kernels
from graftlm.observers import Observer
from graftlm.pooling.sentence_embedding import read_embedding_defaults
from graftlm.registry import Registry, configured_executor
from graftlm.runtime.kernel_events import kernels_reported
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

    check_draft_model(config, registry, model_config, path)
    device = _device_side(config, registry, target, on_stage, watcher)

    if await_tokenizer is not None:
        tokenizer = await_tokenizer()
    grammars = make_grammars(config, registry, tokenizer, model_config, device.spare_core)
    if grammars is not None and config.grammar.preload:
        grammars.preload()

    loop = make_loop(config, registry, target, device, tokenizer, grammars, on_step)
    adapters = device.adapters
    return EngineParts(
        config=config,
        model_config=model_config,
        tokenizer=tokenizer,
        intake=_intake(config, registry, target, device, tokenizer, grammars),
        loop=loop,
        device=platform.device,
        dtype=target.dtype_name,
        embedding=read_embedding_defaults(path),
        weights=device.weights,
        kv=device.kv,
        loaded_parts=device.device_parts,
        adapters=None if adapters is None else AdapterLoader(loop, adapters.catalog, adapters.layers, adapters.read),
        resolved=device.resolved,
        media=device.media,
    )


def _device_side(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
) -> DeviceSide:
    """Load the model, here or in the processes of several ranks."""
    provider = configured_executor(config, registry)
    if provider is not None and provider.capabilities.max_ranks != 1:
        device = start_ranks(config, registry, target, provider, on_stage, watcher)
    else:
        chosen = choose_plugins(config, registry, target)
        device = load_device(config, registry, target, chosen, on_stage, watcher)
    if watcher is None:  # in a server, the main process logs this line, with line numbers of the configuration file
        _logger.info("%s", resolved_line(device.resolved))
    return device


def _intake(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    device: DeviceSide,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
) -> Intake:
    limits = IntakeLimits(
        vocab_size=target.model_config.vocab_size,
        context_len=target.context_len,
        memory_tokens=device.memory.num_pages * config.cache.page_size,
        eos_token_ids=target.model_config.eos_token_ids,
        logits_processors=frozenset(registry.names("logits_processor")),
        generates=device.generates,
        num_labels=device.num_labels,
    )
    catalog = None if device.adapters is None else device.adapters.catalog
    return Intake(limits, lambda params: TextStream(tokenizer, params), time.monotonic, grammars, catalog)


def _ignore(stage: str) -> None:
    """Do nothing."""
