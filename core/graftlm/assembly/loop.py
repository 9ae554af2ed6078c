"""Creates the scheduler and the step loop."""

import time

from graftlm.assembly.cache_factory import CacheFactory
from graftlm.assembly.device_parts import DeviceParts
from graftlm.assembly.drafters import AssembledDrafters
from graftlm.assembly.kv_allocation import AllocatedKV
from graftlm.assembly.media import MediaParts
from graftlm.assembly.target import Target
from graftlm.assembly.tiers import TierParts
from graftlm.config import EngineConfig
from graftlm.contracts import PrefixCache, SchedulingContext
from graftlm.execution.executor import executor_for
from graftlm.execution.spare_core_runner import SpareCoreRunner
from graftlm.grammar.grammar_choice import Grammars
from graftlm.memory import KVManager, LowerTiers, PagePool, RequestTable, RowStates
from graftlm.observers import Observer, Observers
from graftlm.registry import Registry
from graftlm.runtime.spare_core import SpareCore
from graftlm.scheduling import ForcedDrafts, JumpForward, Scheduler, SchedulerLimits
from graftlm.speculation import Speculator
from graftlm.step_loop import StepLoop
from graftlm.tokenization import Tokenizer

__all__ = ["make_loop"]


def make_loop(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    kv: AllocatedKV,
    tiers: TierParts | None,
    device_parts: DeviceParts,
    tokenizer: Tokenizer,
    grammars: Grammars | None,
    spare_core: SpareCore,
    drafters: AssembledDrafters,
    on_step: Observer | None,
    media: MediaParts | None = None,
) -> StepLoop:
    """Create the first prefix cache, the scheduler that uses it, and the loop that calls the scheduler and the runner.

    Args:
        spare_core: the CPU core for compiling grammars; while it is taken, steps on a CPU use one core less.
        drafters: the drafters, which get access to the prefix cache here.
        on_step: function that is called with every committed step, in addition to the plugins that observe steps.
    """
    make_cache = CacheFactory(config, registry, kv.memory, tiers, drafters.listeners)
    runner, is_cpu = device_parts.runner, target.device.type == "cpu"
    executor = executor_for(
        SpareCoreRunner(runner, spare_core) if is_cpu else runner,
        target.device.type,
        overlap=config.scheduling.overlap,
    )
    scheduler = _scheduler(config, registry, target, make_cache(), kv, tiers, tokenizer, drafters, media)
    if drafters.head is not None:
        drafters.head.handle.bind(runner, executor, scheduler.kv.table, config.cache.page_size)
    return StepLoop(
        scheduler,
        executor,
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
    kv: AllocatedKV,
    tiers: TierParts | None,
    tokenizer: Tokenizer,
    drafters: AssembledDrafters,
    media: MediaParts | None,
) -> Scheduler:
    settings, memory = config.scheduling, kv.memory
    table = RequestTable(settings.max_running_requests, kv.max_row_pages)
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
    feeding = None if media is None else media.feeding
    return Scheduler(manager, policy, limits, time.monotonic, jump_forward, speculator, forced_drafts, feeding)
