"""The steps of a simulated replica, and the times that follow from them."""

import numpy as np
import pytest

from graftlm.cache_sim import TraceClock, TraceRequest
from graftlm.contracts import CacheContext, PrefixKey
from graftlm.errors import ConfigError
from graftlm.memory import PagePool
from graftlm.route_sim import ReplicaLimits, SimulatedReplica, SimulatedRequest, StepCosts
from graftlm.routing import Route
from graftlm.testing import OldestAccessFirst
from graftlm_cache.radix import RadixCache

COSTS = StepCosts(step_ms=1000, prefill_us=100_000, decode_us=0)  # a step takes 1 s, and 0.1 s for each prompt token


class Bench:
    """A replica, with the moments of first tokens and ends."""

    def __init__(self, num_pages=64, page_size=4, **limits):
        clock = TraceClock()
        self.cache = RadixCache(CacheContext(page_size, OldestAccessFirst(), clock))
        self.pool = PagePool(num_pages)
        self.first, self.ended, self.now_s, self.end_s = {}, {}, 0.0, None
        self.replica = SimulatedReplica(
            self.cache,
            self.pool,
            clock,
            page_size,
            COSTS,
            ReplicaLimits(**limits),
            lambda request: self.first.update({request.route.key: self.now_s}),
            lambda request: self.ended.update({request.route.key: self.now_s}),
        )

    def add(self, name, tokens, num_outputs=1, at_s=0.0):
        self.run(at_s)
        self.now_s = at_s
        token_ids = np.array(tokens, dtype=np.int32)
        recorded = TraceRequest(at_s, token_ids, len(tokens), len(tokens), output_tokens=num_outputs)
        route = Route(token_ids, "", name, None)
        end_s = self.replica.add(SimulatedRequest(recorded, route, PrefixKey(token_ids), num_outputs), at_s)
        self.end_s = self.end_s if end_s is None else end_s

    def run(self, limit_s=float("inf")):
        while self.end_s is not None and self.end_s <= limit_s:
            self.now_s = self.end_s
            self.end_s = self.replica.advance(self.now_s)


def test_a_prompt_is_computed_in_chunks_and_then_generates_one_token_per_step():
    bench = Bench(prefill_tokens=10)
    bench.add("a", range(25), num_outputs=3)
    bench.run()
    assert bench.first == {"a": pytest.approx(2 + 2 + 1.5)}
    assert bench.ended == {"a": pytest.approx(5.5 + 2)}
    assert bench.replica.totals.busy_s == pytest.approx(7.5)
    assert bench.replica.totals.computed_tokens == 25 + 2


def test_an_arrival_waits_only_for_the_current_step():
    bench = Bench()
    bench.add("a", range(10), num_outputs=100)  # its first token is at 2 s, then a step takes 1 s
    bench.add("b", range(100, 110), num_outputs=1, at_s=7.5)
    bench.run()
    assert bench.first["b"] == pytest.approx(8 + 2)
    assert bench.ended["a"] == pytest.approx(2 + 99 + 1)  # one of its steps took 1 s longer


def test_a_published_prefix_is_found_before_it_is_computed():
    bench = Bench()
    bench.add("a", range(20))
    bench.add("b", range(20), at_s=1.0)
    bench.run()
    assert bench.first == {"a": pytest.approx(3.0), "b": pytest.approx(3.0 + 1.4)}  # 4 of 20 tokens are computed
    assert bench.replica.totals.hit_tokens == 16


def test_requests_wait_for_rows_and_for_pages_and_long_ones_bypass_the_cache():
    bench = Bench(num_pages=5, max_running=2)
    bench.add("a", range(10))
    bench.add("b", range(100, 112))  # three pages, after the two pages of a
    bench.add("c", range(200, 212))  # no row is free, and then no page
    bench.add("d", range(300, 330))
    bench.run()
    assert list(bench.ended) == ["a", "b", "c", "d"]
    assert bench.cache.locked_pages == 0
    assert bench.pool.num_free + bench.cache.evictable_pages == 5


@pytest.mark.parametrize("text", ["", "step_ms", "step=1", "step_ms=-1", "prefill_us=nan", "step_ms=0,decode_us=0"])
def test_wrong_costs_are_refused(text):
    with pytest.raises(ConfigError, match="--cost: "):
        StepCosts.parse(text)


def test_costs_have_defaults_for_missing_names():
    costs = StepCosts.parse("step_ms=9, prefill_us=60")
    assert costs == StepCosts(9, 60, StepCosts().decode_us)
    assert costs.seconds(100, 2) == pytest.approx(0.009 + 0.006 + 2e-6 * costs.decode_us)
