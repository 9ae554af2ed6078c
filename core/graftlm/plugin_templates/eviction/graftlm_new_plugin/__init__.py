"""A graftlm plugin: the eviction strategy `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import EvictionContext, EvictionStrategy

from graftlm_new_plugin.strategy import RecentAndUsed, RecentAndUsedOptions

__all__ = ["provide_eviction_strategies"]


def _create(options: RecentAndUsedOptions, context: EvictionContext) -> EvictionStrategy:
    return RecentAndUsed(options)


@hookimpl
def provide_eviction_strategies() -> list[Provider[EvictionStrategy]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Evicts the least recently used prefix; each hit extends the life of a prefix",
            api_version=1,
            create=_create,
            options=RecentAndUsedOptions,
        )
    ]
