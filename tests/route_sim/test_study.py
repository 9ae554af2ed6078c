"""Policies on simulated replicas."""

import pytest

from graftlm.cache_sim import Choice, parse_capacities
from graftlm.config import PluginSettings
from graftlm.errors import ConfigError
from graftlm.registry import Registry
from graftlm.route_sim import ReplicaLimits, RouteFigures, RouteStudy, StepCosts, parse_replicas


@pytest.fixture(scope="module")
def registry():
    return Registry.load(PluginSettings())


def study(registry, *policies, replicas=(4,), capacity="6000", **values):
    choices = [Choice(name) if isinstance(name, str) else name for name in policies]
    return RouteStudy(
        registry, choices, replicas, Choice("radix"), Choice("lru"), parse_capacities([capacity])[0], **values
    )


SMALL = Choice("cache_aware", {"block_tokens": 16})


def test_one_idle_replica_has_the_hits_of_one_cache(registry, chats):
    costs = StepCosts(step_ms=0.001, prefill_us=0, decode_us=0)
    (fleet,) = study(registry, "round_robin", SMALL, replicas=(1,), costs=costs).run(chats).fleets
    assert fleet.one_cache_hit_tokens > 0.3 * chats.prompt_tokens
    for outcome in fleet.outcomes:
        assert outcome.run.hit_tokens == fleet.one_cache_hit_tokens
        assert len(outcome.run.ttft_s) == len(outcome.run.decision_ns) == len(chats.requests)


def test_cache_aware_keeps_the_hits_and_the_balance(registry, chats):
    (fleet,) = study(registry, SMALL, "random", "approximate_tree", replicas=(4,), event_delay_s=0.01).run(chats).fleets
    aware, random, tree = [RouteFigures.of(outcome, fleet) for outcome in fleet.outcomes]
    assert aware.share_of_one_cache >= 0.95
    assert aware.busiest_tokens <= 1.2
    assert random.hit_rate < tree.hit_rate < aware.hit_rate
    assert aware.ttft_mean_s < random.ttft_mean_s


def test_a_larger_load_has_a_longer_time_to_first_token(registry, chats):
    values = {"costs": StepCosts(step_ms=20), "limits": ReplicaLimits(max_running=4)}
    (slow,) = study(registry, SMALL, replicas=(2,), **values).run(chats).fleets
    (fast,) = study(registry, SMALL, replicas=(2,), speedup=20.0, **values).run(chats).fleets
    assert RouteFigures.of(fast.outcomes[0], fast).ttft_p99_s > 2 * RouteFigures.of(slow.outcomes[0], slow).ttft_p99_s


def test_results_are_the_same_in_each_run(registry, chats):
    def figures():
        (fleet,) = study(registry, SMALL, "power_of_two", replicas=(3,)).run(chats).fleets
        return [(outcome.run.replicas, outcome.run.ttft_s) for outcome in fleet.outcomes]

    assert figures() == figures()


def test_wrong_page_sizes_and_capacities_are_refused(registry, chats):
    with pytest.raises(ConfigError, match=r"--page-size 32 does not divide the block length of trace chats, 16"):
        study(registry, "random", page_size=32).run(chats)
    with pytest.raises(ConfigError, match="10000 replicas with 62500000 pages of 16 tokens are too many"):
        study(registry, "random", replicas=(10_000,), capacity="1G").run(chats)
    with pytest.raises(ConfigError, match="imbalance"):
        study(registry, Choice("cache_aware", {"imbalance": "much"})).check()


@pytest.mark.parametrize("text", ["", "0", "4,x", "-1", "1.5", "10001"])
def test_wrong_numbers_of_replicas_are_refused(text):
    with pytest.raises(ConfigError, match=r"--replicas: expected numbers from 1 to 10,000"):
        parse_replicas(text)


def test_numbers_of_replicas_are_sorted():
    assert parse_replicas("64, 4,1000,4") == [4, 64, 1000]
