"""The built-in routing policies, from `random` to `cache_aware`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graftlm import Provider, hookimpl
from graftlm_routing.options import ApproximateTreeOptions, CacheAwareOptions, ConsistentHashOptions

if TYPE_CHECKING:
    from graftlm.contracts import NoOptions, RoutingContext, RoutingPolicy

__all__ = ["provide_routing_policies"]


def _create_shortest_queue(options: NoOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.simple import ShortestQueue

    return ShortestQueue()


def _create_cache_aware(options: CacheAwareOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.cache_aware import CacheAware

    return CacheAware(options, context)


def _create_approximate_tree(options: ApproximateTreeOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.approximate_tree import ApproximateTree

    return ApproximateTree(options, context.num_replicas)


def _create_consistent_hash(options: ConsistentHashOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.consistent_hash import ConsistentHash

    return ConsistentHash(options, context.num_replicas)


def _create_power_of_two(options: NoOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.simple import PowerOfTwo

    return PowerOfTwo(context.seed)


def _create_round_robin(options: NoOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.simple import RoundRobin

    return RoundRobin()


def _create_random(options: NoOptions, context: RoutingContext) -> RoutingPolicy:
    from graftlm_routing.simple import RandomChoice

    return RandomChoice(context.seed)


@hookimpl
def provide_routing_policies() -> list[Provider[RoutingPolicy]]:
    """Return the providers of the built-in policies."""
    return [
        Provider(
            name="shortest_queue",
            summary="The replica with the fewest queued prompt tokens",
            api_version=1,
            create=_create_shortest_queue,
            rank=10,
        ),
        Provider(
            name="cache_aware",
            summary="The replica with the fewest tokens to compute first, from cache events, with bounded imbalance",
            api_version=1,
            create=_create_cache_aware,
            options=CacheAwareOptions,
        ),
        Provider(
            name="approximate_tree",
            summary="The replica with the longest match in a tree of sent prompts, as SGLang's router chooses",
            api_version=1,
            create=_create_approximate_tree,
            options=ApproximateTreeOptions,
        ),
        Provider(
            name="consistent_hash",
            summary="The replica that a hash of the request's key or first tokens gives, with bounded loads",
            api_version=1,
            create=_create_consistent_hash,
            options=ConsistentHashOptions,
        ),
        Provider(
            name="power_of_two",
            summary="The less loaded of two random replicas",
            api_version=1,
            create=_create_power_of_two,
        ),
        Provider(
            name="round_robin",
            summary="All replicas in turn",
            api_version=1,
            create=_create_round_robin,
        ),
        Provider(
            name="random",
            summary="A random replica, as a baseline",
            api_version=1,
            create=_create_random,
        ),
    ]
