"""A graftlm plugin: the scheduling policy `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import SchedulingContext, SchedulingPolicy

from graftlm_new_plugin.policy import ShortestFirst, ShortestFirstOptions

__all__ = ["provide_scheduling_policies"]


def _create(options: ShortestFirstOptions, context: SchedulingContext) -> SchedulingPolicy:
    return ShortestFirst(options)


@hookimpl
def provide_scheduling_policies() -> list[Provider[SchedulingPolicy]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Admits the request with the fewest tokens left to compute first",
            api_version=1,
            create=_create,
            options=ShortestFirstOptions,
        )
    ]
