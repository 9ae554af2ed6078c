"""Creates the configured drafters."""

from collections.abc import Callable

import numpy as np

from graftlm.assembly.draft_heads import AssembledHead, EngineHead, HeadSource, load_head
from graftlm.assembly.draft_models import load_draft_model
from graftlm.assembly.plugin_choices import ChosenPlugins
from graftlm.assembly.target import Target
from graftlm.config import EngineConfig
from graftlm.contracts import Drafter, DrafterContext, DraftHead, DraftHeadContext, DraftModel, PrefixKey
from graftlm.errors import ConfigError
from graftlm.memory import KVManager
from graftlm.records import CacheEvent
from graftlm.registry import Registry, configured_drafters
from graftlm.speculation import Speculator
from graftlm.types import TokenIds

__all__ = ["AssembledDrafters", "make_drafters"]

_NOT_WITH_RANKS = (
    "speculation.drafter: {} are not supported while the ranks are separate processes. Remove the drafter, or set "
    "parallel.tensor: 1 and parallel.executor: auto"
)


class AssembledDrafters:
    """The drafters of an engine, and their access to the prefix cache, which is created after them.

    Attributes:
        by_name: name -> drafter, in the order in which drafters are called.
        speculator: calls the drafters; None before `start`, or without drafts.
        head: the draft head; None without a drafter that has one.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Drafter] = {}
        self.speculator: Speculator | None = None
        self.head: AssembledHead | None = None
        self._manager: KVManager | None = None

    def start(self, manager: KVManager, speculator: Speculator | None) -> None:
        """Set the manager of the prefix cache that `continuation` reads, and the speculator that calls the drafters."""
        self._manager, self.speculator = manager, speculator

    @property
    def listeners(self) -> list[Callable[[CacheEvent], None]]:
        """The functions that get the events of the prefix cache; none if no drafter processes events."""
        is_read = any(type(drafter).cache_event is not Drafter.cache_event for drafter in self.by_name.values())
        return [self._cache_event] if is_read else []

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return the tokens that follow a key in the prefix cache, up to a picture.

        Returns no tokens before `start` is called.
        """
        if self._manager is None:
            return np.empty(0, dtype=np.int32)
        found = self._manager.cache.continuation(key, num_tokens)
        (placeholders,) = (found < 0).nonzero()
        return found[: placeholders[0]] if len(placeholders) else found

    def _cache_event(self, event: CacheEvent) -> None:
        if self.speculator is not None:
            self.speculator.cache_event(event)


def make_drafters(
    config: EngineConfig,
    registry: Registry,
    target: Target,
    chosen: ChosenPlugins | None,
    on_stage: Callable[[str], None],
    watcher: Callable[[str], None] | None,
) -> AssembledDrafters:
    """Create the configured drafters.

    These are the drafters in `speculation.first` and then `speculation.drafter`. "auto" stands for all available
    drafters that need no options.

    Memory of draft models is allocated here, before the engine's KV memory is sized from the remaining memory.

    Args:
        chosen: the providers that draft models and draft heads use; None: the ranks are other processes, and both are
            refused.
        on_stage: function that is called with the name of the stage in which a draft model is loaded.
        watcher: called with the progress of reading; None: progress is shown on a terminal.

    Raises:
        GraftlmError: a drafter cannot be created.
    """
    settings, assembled = config.speculation, AssembledDrafters()

    def load(path: str, kv_tokens: int) -> DraftModel:
        if chosen is None:
            raise ConfigError(_NOT_WITH_RANKS.format("draft models"))
        on_stage("loading the draft model")
        return load_draft_model(config, registry, target, chosen, path, kv_tokens, watcher)

    def load_draft_head(make: Callable[[DraftHeadContext], DraftHead], path: str | None) -> EngineHead:
        if assembled.head is not None:
            raise ConfigError("speculation.drafter: an engine has at most one draft head, but two drafters load one")
        if chosen is None:
            raise ConfigError(_NOT_WITH_RANKS.format("draft heads"))
        on_stage("loading the draft head")
        capabilities = chosen.attention_provider.capabilities
        source = HeadSource(chosen.model, target.model_context, target.path, target.platform, capabilities)
        assembled.head = load_head(config, source, make, path, watcher)
        return assembled.head.handle

    context = DrafterContext(assembled.continuation, target.model_config.vocab_size, load, load_draft_head)
    for provider in configured_drafters(config, registry):
        options = settings.drafter.options if provider.name == settings.drafter.name else {}
        assembled.by_name[provider.name] = registry.create("drafter", provider, options, context, config.origins)
    return assembled
