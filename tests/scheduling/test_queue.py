"""The order in which waiting requests are considered, and the number of cache look-ups."""

import numpy as np
import pytest

from graftlm.contracts import CacheContext, PrefixKey
from graftlm.scheduling import Request
from graftlm.scheduling.queue import WaitingQueue
from graftlm.types import SamplingParams
from graftlm_cache.radix import RadixCache
from graftlm_eviction.lru import LRU
from graftlm_scheduling.fcfs import FirstComeFirstServed
from graftlm_scheduling.lpm import LongestPrefixMatch
from graftlm_scheduling.options import ReorderingOptions


class CountingCache(RadixCache):
    """Counts its look-ups."""

    num_probes = 0

    def probe_again(self, key, place):
        self.num_probes += 1
        return super().probe_again(key, place)


class Rig:
    def __init__(self, policy=None):
        self.caches = [self.make_cache()]
        self.queue = WaitingQueue(policy or LongestPrefixMatch(ReorderingOptions()), lambda: self.caches[-1], 1)
        self.requests = {}

    def make_cache(self):
        return CountingCache(CacheContext(1, LRU(), lambda: 0.0))

    def add(self, name, prompt, arrival_s=0.0, **fields):
        tokens = np.array([ord(c) for c in prompt], dtype=np.int32)
        self.requests[name] = Request(
            name, tokens, SamplingParams(), 4, frozenset(), seed=0, arrival_s=arrival_s, **fields
        )
        self.queue.add(self.requests[name])

    def remember(self, text):
        key = PrefixKey(np.array([ord(c) for c in text], dtype=np.int32))
        cache = self.caches[-1]
        match = cache.match(key)
        cache.insert(key, np.arange(len(match.pages), len(text), dtype=np.int32), match.handle)

    def order(self, now=0.0):
        return [request.request_id for request in self.queue.ordered(now)]


def test_siblings_follow_each_other_even_if_nothing_is_cached():
    rig = Rig()
    for name, prompt in [("a1", "aaaa1"), ("b1", "bbbb1"), ("a2", "aaaa2"), ("c", "cccc"), ("b2", "bbbb2")]:
        rig.add(name, prompt)
    assert rig.order() == ["a1", "a2", "b1", "b2", "c"]
    rig.remember("bb")
    assert rig.order() == ["b1", "b2", "a1", "a2", "c"]


def test_the_cache_is_asked_again_only_after_a_change():
    rig = Rig()
    for i in range(10):
        rig.add(f"r{i}", f"{i}xyz")
    rig.order()
    rig.order()
    assert rig.caches[-1].num_probes == 10
    rig.remember("3xy")
    assert rig.order()[0] == "r3"
    assert rig.caches[-1].num_probes == 20


def test_a_policy_that_reads_no_cache_data_causes_no_look_up_and_no_tree():
    rig = Rig(FirstComeFirstServed())
    for name in ("a", "b", "c"):
        rig.add(name, "same")
    assert rig.order() == ["a", "b", "c"]
    assert rig.caches[-1].num_probes == 0
    assert len(rig.queue._tree) == 0


def test_removed_requests_leave_nothing_in_the_tree():
    rig = Rig()
    for name in ("a", "b", "c", "d"):
        rig.add(name, f"same{name}")
        rig.order()
    assert len(rig.queue._tree) > 0
    for request in list(rig.queue):
        rig.queue.remove(request)
    assert len(rig.queue._tree) == 0


def test_results_of_a_replaced_cache_are_not_used():
    rig = Rig()
    rig.add("a", "aaaa1")
    rig.add("b", "bbbb1")
    rig.remember("bbbb")
    assert rig.order() == ["b", "a"]
    rig.caches.append(rig.make_cache())
    assert rig.order() == ["a", "b"]


def test_a_retracted_request_returns_to_its_place():
    rig = Rig(FirstComeFirstServed())
    for number, name in enumerate("abcd"):
        rig.add(name, name, arrival_s=float(number // 2))  # two requests arrive at once
    back = rig.requests["a"]
    rig.queue.admit(back, now=3.0)
    assert rig.order() == ["b", "c", "d"]
    back.num_retractions += 1
    rig.queue.add(back)
    assert rig.order() == ["a", "b", "c", "d"]


@pytest.mark.parametrize("leaves", ["remove", "discard", "admit"])
def test_a_removed_request_is_removed_from_the_tree(leaves):
    rig = Rig()
    for name in "abc":
        rig.add(name, "same prompt")
    rig.order()
    rig.add("d", "same prompt")  # not yet in the tree
    for name in "ad":
        request = rig.requests[name]
        rig.queue.admit(request, 0.0) if leaves == "admit" else getattr(rig.queue, leaves)(request)
    assert rig.order() == ["b", "c"]
    assert len(rig.queue) == len(rig.queue._tree) == 2


def test_priority_precedes_ageing_and_ageing_precedes_the_policy():
    rig = Rig(LongestPrefixMatch(ReorderingOptions(max_wait_s=5.0)))
    rig.remember("cccc")
    rig.add("aged", "aaaa", arrival_s=0.0)
    rig.add("passes", "cccc1", arrival_s=1.0)
    rig.add("cached", "cccc2", arrival_s=2.0)
    rig.add("urgent", "uuuu", arrival_s=3.0, priority=1)
    rig.queue.admit(rig.requests["passes"], now=4.0)
    assert rig.order(now=8.9) == ["urgent", "cached", "aged"]
    assert rig.order(now=9.0) == ["urgent", "aged", "cached"]
    assert rig.queue.num_aged == 1
    assert rig.queue.highest_priority == 1


class Meddling(FirstComeFirstServed):
    """Changes the list that it gets."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def order(self, waiting, now):
        if self.way == "takes all out in its order":
            return [waiting.pop() for _ in range(len(waiting))]
        first = waiting[0]
        waiting.clear()
        if self.way == "raises":
            raise ValueError("none left")
        if self.way == "repeats":
            waiting += [first] * 3
        return waiting


@pytest.mark.parametrize(
    ("way", "order", "told"),
    [
        ("takes all out in its order", ["c", "b", "a"], None),
        ("raises", ["a", "b", "c"], "failed with ValueError"),
        ("repeats", ["a", "b", "c"], "did not return a permutation"),
        ("drops", ["a", "b", "c"], "did not return a permutation"),
    ],
)
def test_a_policy_that_changes_its_list_loses_no_request_and_is_logged_once(way, order, told, caplog):
    rig = Rig(Meddling(way))
    for name in "abc":
        rig.add(name, name)
    assert [rig.order() for _ in range(3)] == [order] * 3
    assert [told in record.getMessage() for record in caplog.records] == ([True] if told else [])
