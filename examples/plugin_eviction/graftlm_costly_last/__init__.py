"""A graftlm plugin that provides the eviction strategy `costly-last`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_costly_last.strategy import CostlyLast, CostlyLastOptions

if TYPE_CHECKING:
    from graftlm.contracts import EvictionContext, EvictionStrategy

__all__ = ["provide_eviction_strategies"]


def _create(options: CostlyLastOptions, context: EvictionContext) -> EvictionStrategy:
    return CostlyLast(options)


@hookimpl
def provide_eviction_strategies() -> list[Provider[EvictionStrategy]]:
    """Offer `costly-last`."""
    return [
        Provider(
            name="costly-last",
            summary="Keeps longer what is expensive to compute again",
            api_version=1,
            create=_create,
            options=CostlyLastOptions,
        ),
    ]
