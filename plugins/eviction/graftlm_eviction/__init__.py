"""The built-in eviction strategies: `lru`, `slru`, `lfu`, `fifo`, `filo`, `mru`, `priority`, `reuse_odds`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_eviction.reuse_odds import ReuseOddsOptions
from graftlm_eviction.slru import SegmentedLRUOptions

if TYPE_CHECKING:
    from graftlm.contracts import EvictionContext, EvictionStrategy, NoOptions

__all__ = ["provide_eviction_strategies"]


def _create_lru(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.lru import LRU

    return LRU()


def _create_lfu(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.lfu import LFU

    return LFU()


def _create_fifo(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.fifo import FIFO

    return FIFO()


def _create_filo(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.filo import FILO

    return FILO()


def _create_mru(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.mru import MRU

    return MRU()


def _create_priority(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.priority import RequestPriority

    return RequestPriority()


def _create_slru(options: SegmentedLRUOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.slru import SegmentedLRU

    return SegmentedLRU(options, context)


def _create_reuse_odds(options: ReuseOddsOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.reuse_odds import ReuseOdds

    return ReuseOdds(options, context)


@hookimpl
def provide_eviction_strategies() -> list[Provider[EvictionStrategy]]:
    """Return the providers of the built-in strategies."""
    return [
        Provider(
            name="lru",
            summary="Evicts the least recently used prefix",
            api_version=1,
            create=_create_lru,
            rank=10,
        ),
        Provider(
            name="slru",
            summary="Segmented LRU: protects prefixes that had a hit, so that a scan cannot evict them",
            api_version=1,
            create=_create_slru,
            options=SegmentedLRUOptions,
        ),
        Provider(
            name="lfu",
            summary="Evicts the prefix with the fewest hits",
            api_version=1,
            create=_create_lfu,
        ),
        Provider(
            name="fifo",
            summary="Evicts the prefix that was inserted first",
            api_version=1,
            create=_create_fifo,
        ),
        Provider(
            name="filo",
            summary="Evicts the prefix that was inserted last",
            api_version=1,
            create=_create_filo,
        ),
        Provider(
            name="mru",
            summary="Evicts the most recently used prefix, for loops over more prompts than fit",
            api_version=1,
            create=_create_mru,
        ),
        Provider(
            name="priority",
            summary="Evicts the prefix that was used only by requests of low priority",
            api_version=1,
            create=_create_priority,
        ),
        Provider(
            name="reuse_odds",
            summary="Evicts the prefix that is least likely to be reused; learns the odds for each kind of prompt",
            api_version=1,
            create=_create_reuse_odds,
            options=ReuseOddsOptions,
        ),
    ]
