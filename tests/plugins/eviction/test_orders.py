import pytest

import graftlm_eviction
from graftlm.contracts import EvictionContext, NodeStats

OLD = NodeStats(created=1.0, last_access=1.0)
OLD_USED_LATE = NodeStats(created=1.0, last_access=9.0, hits=1)
OLD_USED_OFTEN = NodeStats(created=1.0, last_access=5.0, hits=4)
NEW = NodeStats(created=6.0, last_access=6.0)
IMPORTANT = NodeStats(created=2.0, last_access=2.0, priority=5)
UNIMPORTANT = NodeStats(created=8.0, last_access=8.0, priority=-1)

PROVIDERS = {provider.name: provider for provider in graftlm_eviction.provide_eviction_strategies()}


def create(name):
    provider = PROVIDERS[name]
    return provider.create(provider.options(), EvictionContext(total_pages=64, page_size=1))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("lru", [OLD, IMPORTANT, OLD_USED_OFTEN, NEW, UNIMPORTANT, OLD_USED_LATE]),
        ("mru", [OLD_USED_LATE, UNIMPORTANT, NEW, OLD_USED_OFTEN, IMPORTANT, OLD]),
        ("fifo", [OLD_USED_LATE, IMPORTANT, NEW, UNIMPORTANT]),
        ("filo", [UNIMPORTANT, NEW, IMPORTANT, OLD_USED_LATE]),
        ("lfu", [OLD, IMPORTANT, NEW, UNIMPORTANT, OLD_USED_LATE, OLD_USED_OFTEN]),
        ("priority", [UNIMPORTANT, OLD, OLD_USED_OFTEN, NEW, OLD_USED_LATE, IMPORTANT]),
    ],
)
def test_leaves_are_evicted_in_this_order(name, order):
    strategy = create(name)
    wrong_way_round = order[::-1]
    assert sorted(wrong_way_round, key=strategy.priority) == order


@pytest.mark.parametrize("name", ["fifo", "filo"])
def test_a_hit_does_not_change_the_order(name):
    strategy = create(name)
    assert strategy.priority(OLD) == strategy.priority(OLD_USED_LATE) == strategy.priority(OLD_USED_OFTEN)
