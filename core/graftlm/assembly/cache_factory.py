"""Creates the prefix cache when the engine starts, and each time the KV memory restarts empty."""

import logging
import time
from collections.abc import Callable, Sequence

from graftlm.assembly.cache_events import CacheEvents
from graftlm.assembly.kv_memory import KVMemory
from graftlm.assembly.tiers import TierParts
from graftlm.config import EngineConfig
from graftlm.contracts import CacheContext, EvictionContext, PrefixCache
from graftlm.records import CacheEvent
from graftlm.registry import Registry

__all__ = ["CacheFactory"]

_logger = logging.getLogger(__name__)


class CacheFactory:
    """Creates empty prefix caches, each with a new eviction strategy.

    Args:
        listeners: functions that get each event of the caches, in addition to the plugins that observe events.
    """

    def __init__(
        self,
        config: EngineConfig,
        registry: Registry,
        memory: KVMemory,
        tiers: TierParts | None,
        listeners: Sequence[Callable[[CacheEvent], None]] = (),
    ) -> None:
        self._config = config
        self._registry = registry
        self._memory = memory
        self._tiers = tiers
        self._events = CacheEvents([*registry.observers("cache_event"), *listeners])
        self._has_created = False

    def __call__(self) -> PrefixCache:
        """Create a cache that replaces the previous one.

        Effects: observers get a "cleared" event for the previous cache. If the lower tiers cannot be created again, the
            new cache works without them.

        Raises:
            GraftlmError: the cache or its eviction strategy cannot be created.
        """
        is_first, self._has_created = not self._has_created, True
        if not is_first:
            self._events.clear()
        if is_first or self._tiers is None:
            return self._create(self._tiers)
        try:
            return self._create(self._tiers)
        except Exception:
            _logger.exception("host memory or storage cannot be created again: the prefix cache continues without them")
            return self._create(None)

    def _create(self, tiers: TierParts | None) -> PrefixCache:
        config, registry, settings = self._config, self._registry, self._config.cache
        eviction = registry.create(
            "eviction",
            registry.provider("eviction", settings.eviction.name),
            settings.eviction.options,
            EvictionContext(self._memory.num_pages, settings.page_size),
            config.origins,
        )
        context = CacheContext(
            settings.page_size,
            eviction,
            time.monotonic,
            self._events.listener,
            window=self._memory.window,
            states=self._memory.states,
            transfer=None if tiers is None else tiers.queue,
            create_storage=None if tiers is None else tiers.create_storage,
        )
        cache: PrefixCache = registry.create(
            "cache", registry.provider("cache", settings.name), settings.options, context
        )
        return cache
