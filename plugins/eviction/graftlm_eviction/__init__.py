"""Eviction strategies that come with graftlm: `lru`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl

if TYPE_CHECKING:
    from graftlm.contracts import EvictionContext, EvictionStrategy, NoOptions

__all__ = ["provide_eviction_strategies"]


def _create_lru(options: NoOptions, context: EvictionContext) -> EvictionStrategy:
    from graftlm_eviction.lru import LRU

    return LRU()


@hookimpl
def provide_eviction_strategies() -> list[Provider[EvictionStrategy]]:
    """Offer the built-in strategies."""
    return [
        Provider(
            name="lru",
            summary="Evicts what was used longest ago",
            api_version=1,
            create=_create_lru,
            rank=10,
        ),
    ]
