"""Creates the scheduler and the step loop."""

import time

from graftlm.assembly.cache_factory import CacheFactory
from graftlm.assembly.device_side import DeviceSide
from graftlm.assembly.target import Target
from graftlm.config import EngineConfig
from graftlm.contracts import PrefixCache, SchedulingContext
from graftlm.grammar.grammar_choice import Grammars
from graftlm.memory import KVManager, LowerTiers, PagePool, RequestTable, RowStates
from graftlm.observers import Observer, Observers
from graftlm.registry import Registry
from graftlm.scheduling import ForcedDrafts, JumpForward, Scheduler, SchedulerLimits
from graftlm.speculation import Speculator
from graftlm.step_loop import StepLoop
from graftlm.tokenization import Tokenizer

__all__ = ["make_loop"]


def make_loop(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    device: DeviceSide,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
    on_step: Observer | None,
) -> StepLoop:
    """Create the first prefix cache, the scheduler that uses it, and the loop that calls the scheduler and the runner.

    Args:
        device: the executor and the sizes of the device's memory; its drafters get access to the prefix cache here.
        on_step: function that is called with every committed step, in addition to the plugins that observe steps.
    """
    tiers, drafters, media = device.tiers, device.drafters, device.media
    make_cache = CacheFactory(config, registry, device.memory, tiers, drafters.listeners)
    scheduler = _scheduler(config, registry, target, make_cache(), device, tokenizer)
    if drafters.head is not None and device.device_parts is not None:
        runner = device.device_parts.runner
        drafters.head.handle.bind(runner, device.executor, scheduler.kv.table, config.cache.page_size)
    return StepLoop(
        scheduler,
        device.executor,
        overlap=config.scheduling.overlap,
        make_cache=make_cache,
        observers=Observers(
            registry.observers("request_finished"),
            registry.observers("step_finished") + (() if on_step is None else (on_step,)),
        ),
        clock=time.monotonic,
        mover=None if tiers is None else tiers.mover,
        grammars=grammars,
        close_media=None if media is None else media.features.close,
        debug=config.debug,
    )


def _scheduler(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    cache: PrefixCache,
    device: DeviceSide,
    tokenizer: Tokenizer,
) -> Scheduler:
    settings, memory, tiers, drafters = config.scheduling, device.memory, device.tiers, device.drafters
    table = RequestTable(settings.max_running_requests, device.max_row_pages)
    lower = None if tiers is None else LowerTiers(cache, tiers.queue)
    page_size = config.cache.page_size
    states = None if memory.states is None else RowStates(memory.states, table, page_size)
    manager = KVManager(PagePool(memory.num_pages), cache, table, page_size, memory.window, lower, states)
    provider = registry.provider("scheduling", settings.policy.name)
    policy = registry.create("scheduling", provider, settings.policy.options, SchedulingContext(), config.origins)
    limits = SchedulerLimits(settings.max_queued_requests, settings.prefill_tokens_per_step, settings.mix_chunks)
    jump_forward = JumpForward(tokenizer) if config.grammar.jump_forward == "fast" else None
    forced_drafts = ForcedDrafts(tokenizer) if config.grammar.jump_forward == "exact" else None
    speculator = None
    if drafters.by_name or forced_drafts is not None:
        speculator = Speculator(drafters.by_name, config.speculation.max_drafts, target.model_config.vocab_size)
    drafters.start(manager, speculator)
    feeding = None if device.media is None else device.media.feeding
    return Scheduler(manager, policy, limits, time.monotonic, jump_forward, speculator, forced_drafts, feeding)
