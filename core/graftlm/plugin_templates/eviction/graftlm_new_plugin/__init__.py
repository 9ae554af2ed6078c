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
            summary="Least recently used, with a grace for each hit",
            api_version=1,
            create=_create,
            options=RecentAndUsedOptions,
        )
    ]
