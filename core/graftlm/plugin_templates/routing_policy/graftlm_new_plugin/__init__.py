"""A graftlm plugin: the routing policy `new-plugin`."""

from graftlm import Provider, hookimpl
from graftlm.contracts import RoutingContext, RoutingPolicy

from graftlm_new_plugin.policy import StickyKeys, StickyKeysOptions

__all__ = ["provide_routing_policies"]


def _create(options: StickyKeysOptions, context: RoutingContext) -> RoutingPolicy:
    return StickyKeys(options)


@hookimpl
def provide_routing_policies() -> list[Provider[RoutingPolicy]]:
    """Offer `new-plugin`."""
    return [
        Provider(
            name="new-plugin",
            summary="Requests with the same key stay on one replica while it has few requests",
            api_version=1,
            create=_create,
            options=StickyKeysOptions,
        )
    ]
