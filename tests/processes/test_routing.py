"""The router of a server's replicas, and the reports about their caches."""

import numpy as np
import pytest

from graftlm.config import EngineConfig
from graftlm.errors import ConfigError, UnknownProviderError
from graftlm.processes.messages import decode, encode
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.routing import CacheReporter, changes_of, make_router
from graftlm.records import CacheEvent
from graftlm.registry import Registry
from graftlm.routing import BlockDigests

TOKENS = np.arange(64, dtype=np.int32)


def router_of(num_replicas=2, **routing):
    parallel = {"data": num_replicas, "routing": routing} if routing else {"data": num_replicas}
    return make_router(EngineConfig.load({"parallel": parallel, "cache": {"page_size": 16}}), Registry.load())


@pytest.mark.parametrize(
    ("num_replicas", "routing", "expected"),
    [
        (1, {"name": "cache_aware"}, None),
        (2, {}, None),
        (2, {"name": "cache_aware"}, 64),
        (2, {"name": "cache_aware", "options": {"block_tokens": 4}}, 16),
        (2, {"name": "approximate_tree"}, None),
    ],
)
def test_schedulers_report_blocks_of_the_policy_that_needs_them(num_replicas, routing, expected):
    assert router_of(num_replicas, **routing).event_block_tokens == expected


def test_wrong_names_and_options_are_refused():
    with pytest.raises(UnknownProviderError, match="Unknown routing policy 'cache_aware2'"):
        router_of(name="cache_aware2")
    with pytest.raises(ConfigError, match=r"parallel\.routing\.options\.imbalance"):
        router_of(name="cache_aware", options={"imbalance": -1})


def test_a_reported_prefix_attracts_requests_until_the_process_dies():
    replicas = ReplicaSet(["scheduler-0", "scheduler-1"], True, router_of(name="cache_aware"))
    for name in ("scheduler-0", "scheduler-1"):
        replicas.started(name)
    reporter = CacheReporter(64, "scheduler-1")
    reporter.cache_event(CacheEvent("stored", 64, 1, None, "tenant", TOKENS))
    replicas.replicas[1].report_cache(changes_of(decode(encode(reporter.take()))))
    assert reporter.take() is None

    def chosen(namespace):
        return replicas.router.choose(replicas.router.route(TOKENS, namespace))

    assert [chosen("tenant"), chosen("")] == [1, 0]
    replicas.died("scheduler-1", "killed")
    replicas.started("scheduler-1")
    assert chosen("tenant") == 0


def test_the_first_report_of_a_process_replaces_those_of_the_process_before_it():
    first, second = CacheReporter(16, "scheduler-0"), CacheReporter(16, "scheduler-0")
    first.cache_event(CacheEvent("stored", 32, 1, None, "", TOKENS[:32]))
    digests = BlockDigests(16).of_prompt(TOKENS[:32], "")
    assert changes_of(first.take()) == [("cleared", []), ("stored", digests)]
    first.cache_event(CacheEvent("removed", 32, 1))
    assert changes_of(first.take()) == [("removed", digests)]
    assert changes_of(second.take()) == [("cleared", [])]
