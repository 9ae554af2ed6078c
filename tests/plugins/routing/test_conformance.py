"""Each built-in routing policy keeps the contract."""

import pytest

import graftlm_routing
from graftlm.contracts import API_VERSION, RoutingContext, RoutingPolicy
from graftlm.testing import RoutingPolicyConformance

PROVIDERS = {provider.name: provider for provider in graftlm_routing.provide_routing_policies()}


def make(name, num_replicas=4, page_size=1, seed=0, **options):
    provider = PROVIDERS[name]
    return provider.create(provider.options(**options), RoutingContext(num_replicas, page_size, seed))


def kit_of(name, **options):
    class Kit(RoutingPolicyConformance):
        def create(self, context: RoutingContext) -> RoutingPolicy:
            return make(name, context.num_replicas, context.page_size, context.seed, **options)

    return Kit


class TestRandom(kit_of("random")):
    pass


class TestRoundRobin(kit_of("round_robin")):
    pass


class TestPowerOfTwo(kit_of("power_of_two")):
    pass


class TestShortestQueue(kit_of("shortest_queue")):
    pass


class TestConsistentHash(kit_of("consistent_hash", prefix_tokens=16)):
    pass


class TestApproximateTree(kit_of("approximate_tree", max_blocks=20, balance_abs_threshold=1)):
    pass


class TestCacheAware(kit_of("cache_aware", block_tokens=16, slack_requests=1.0, max_staleness_s=2.0, window_s=1.0)):
    pass


class TestCacheAwareWithASmallIndex(kit_of("cache_aware", block_tokens=16, max_blocks=4)):
    pass


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("random", "RandomChoice"),
        ("round_robin", "RoundRobin"),
        ("power_of_two", "PowerOfTwo"),
        ("shortest_queue", "ShortestQueue"),
        ("consistent_hash", "ConsistentHash"),
        ("approximate_tree", "ApproximateTree"),
        ("cache_aware", "CacheAware"),
    ],
)
def test_a_provider_creates_its_policy(name, class_name):
    assert type(make(name)).__name__ == class_name
    assert PROVIDERS[name].api_version == API_VERSION


def test_auto_selects_the_shortest_queue():
    assert max(PROVIDERS.values(), key=lambda provider: provider.rank).name == "shortest_queue"
