import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np
import pytest

import graftlm.testing
from graftlm.contracts import (
    CacheContext,
    EvictionStrategy,
    InsertResult,
    NodeStats,
    Preemption,
    PrefixCache,
    PrefixKey,
    PrefixMatch,
    SchedulingPolicy,
)
from graftlm.testing import (
    Conformance,
    EvictionStrategyConformance,
    NaiveCache,
    OldestAccessFirst,
    PrefixCacheConformance,
    SchedulingPolicyConformance,
    iter_conformance,
    run_conformance,
)


class SmallKit(Conformance):
    parameters: ClassVar[dict[str, Any]] = {"size": (1, 2), "color": ("red", "blue")}

    def test_all_combinations(self, size: int, color: str) -> None:
        """Sizes come
        in colors."""
        assert (size, color) != (2, "red"), "too large for red"

    def test_without_parameters(self) -> None:
        raise SkipTest("not here")

    def helper(self) -> None:
        raise AssertionError("never called")


def test_a_kit_runs_without_pytest():
    results = run_conformance(SmallKit)
    assert [(result.name, str(result.error or "").partition("\n")[0], result.skipped) for result in results] == [
        ("test_all_combinations[1-red]", "", None),
        ("test_all_combinations[1-blue]", "", None),
        ("test_all_combinations[2-red]", "too large for red", None),
        ("test_all_combinations[2-blue]", "", None),
        ("test_without_parameters", "", "not here"),
    ]
    assert results[0].sentence == "Sizes come in colors."


class TestUnderPytest(SmallKit):
    """The same kit, collected by pytest, which supplies the parameters."""

    parameters: ClassVar[dict[str, Any]] = {"size": (1,), "color": ("red", "blue")}


# -- Each faulty implementation fails the test of the sentence that it breaks


class MatchesOnePageLess(NaiveCache):
    def match(self, key, resume=None):
        match = super().match(PrefixKey(key.token_ids[: max(0, len(key.token_ids) - 1)], key.namespace), resume)
        return PrefixMatch(match.handle, match.pages)


class SharesNamespaces(NaiveCache):
    def _prefix(self, key, num_pages):
        return super()._prefix(PrefixKey(key.token_ids), num_pages)


class EvictsLocked(NaiveCache):
    def _evictable_leaves(self):
        return [entry for entry in self._entries.values() if entry.num_children == 0]


class EvictsRoots(NaiveCache):
    def _evictable_leaves(self):
        return [entry for entry in self._entries.values() if entry.num_locks == 0]


class EvictsNewest(NaiveCache):
    def _evictable_leaves(self):
        return super()._evictable_leaves()[-1:]


class EvictsOnePageLess(NaiveCache):
    def evict(self, num_pages):
        return super().evict(num_pages - 1)


class ProbeCountsAsAccess(NaiveCache):
    def probe(self, key):
        return len(self.match(key).pages)


class NeverChangesVersion(NaiveCache):
    @property
    def version(self):
        return 0


class KeepsDuplicates(NaiveCache):
    def insert(self, key, pages, handle):
        result = super().insert(key, pages, handle)
        return InsertResult(handle.num_pages, result.cached_pages, result.handle, np.array(pages))


class CountsOneLock(NaiveCache):
    def lock(self, handle):
        if handle.num_locks == 0:
            super().lock(handle)

    def unlock(self, handle):
        if handle.num_locks:
            super().unlock(handle)


class CountsEachChunk(NaiveCache):
    def match(self, key, resume=None):
        whole = super().match(key)
        return PrefixMatch(whole.handle, whole.pages[resume.num_pages if resume else 0 :])


class SendsNoEvents(NaiveCache):
    def _report(self, event):
        self._version += 1


def failed(kit: type[Conformance]) -> set[str]:
    return {result.name.partition("[")[0] for result in run_conformance(kit) if result.error}


def fails(kit: type[Conformance], test: str) -> bool:
    """Return whether a test of a kit fails, without running those after it."""
    return any(result.error and result.name.partition("[")[0] == test for result in iter_conformance(kit))


class ExposesTheCallersKey(NaiveCache):
    """Compares copies of the tokens, but its snapshot has the array that `insert` was given."""

    def insert(self, key, pages, handle):
        result = super().insert(key, pages, handle)
        for entry in self._entries.values():
            if len(key.token_ids) >= entry.stats.depth + entry.stats.tokens and entry.prefix == self._prefix(
                key, entry.num_pages
            ):
                entry.token_ids = key.token_ids[entry.stats.depth :][: entry.stats.tokens]
        return result


class KeepsTheCallersPages(NaiveCache):
    def _add(self, key, pages, parent):
        entry = super()._add(key, pages, parent)
        entry.pages = self._offered[parent.num_pages - self._offered_from :][:1]
        return entry

    def insert(self, key, pages, handle):
        self._offered, self._offered_from = pages, handle.num_pages
        return super().insert(key, pages, handle)


class SendsTheCallersKey(NaiveCache):
    """Sends events with the array that `insert` was given."""

    def insert(self, key, pages, handle):
        self._key = key
        return super().insert(key, pages, handle)

    def _report(self, event):
        if event.kind == "stored":
            depth = next(reversed(self._entries.values())).stats.depth
            event = replace(event, token_ids=self._key.token_ids[depth:][: event.num_tokens])
        super()._report(event)


class ContinuesItself(NaiveCache):
    """Returns the texts of its entries after a key; with mistakes, in the classes below."""

    def texts(self, namespace):
        return [np.frombuffer(text, np.int32) for owner, text in self._entries if owner == namespace]

    def continuation(self, key, num_tokens):
        length = len(key.token_ids)
        fits = [text for text in self.texts(key.namespace) if np.array_equal(text[:length], key.token_ids)]
        return max(fits, key=len)[length : length + num_tokens] if fits else np.empty(0, dtype=np.int32)


class ContinuesOtherNamespaces(ContinuesItself):
    def texts(self, namespace):
        return super().texts("") + super().texts("tenant")


class ContinuesTheLastPage(ContinuesItself):
    """Takes a key that ends inside a page for one that ends before it."""

    def continuation(self, key, num_tokens):
        length = len(key.token_ids) // self._context.page_size * self._context.page_size
        return super().continuation(PrefixKey(key.token_ids[:length], key.namespace), num_tokens)


class ContinuesTooFar(ContinuesItself):
    def continuation(self, key, num_tokens):
        return super().continuation(key, num_tokens + 1)


class ContinuationTouches(ContinuesItself):
    def continuation(self, key, num_tokens):
        self.match(key)
        return super().continuation(key, num_tokens)


class ContinuesWhatIsGone(ContinuesItself):
    def __init__(self, context):
        super().__init__(context)
        self.all_texts = []

    def insert(self, key, pages, handle):
        self.all_texts.append(key.token_ids.copy())
        return super().insert(key, pages, handle)

    def texts(self, namespace):
        return self.all_texts if namespace == "" else super().texts(namespace)


def test_a_cache_with_continuations_keeps_the_contract():
    assert failed(kit_of(ContinuesItself, granularity=1)) == set()


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (ContinuesOtherNamespaces, "test_a_continuation_is_what_was_inserted_after_the_key"),
        (ContinuesTheLastPage, "test_a_continuation_is_what_was_inserted_after_the_key"),
        (ContinuesTooFar, "test_a_continuation_is_what_was_inserted_after_the_key"),
        (ContinuesWhatIsGone, "test_a_continuation_is_what_was_inserted_after_the_key"),
        (ContinuationTouches, "test_continuation_changes_nothing"),
        (ExposesTheCallersKey, "test_the_cache_keeps_copies"),
        (KeepsTheCallersPages, "test_the_cache_keeps_copies"),
        (SendsTheCallersKey, "test_the_cache_keeps_copies"),
        (MatchesOnePageLess, "test_match_finds_the_longest_prefix_in_whole_pages"),
        (SharesNamespaces, "test_namespaces_never_share"),
        (EvictsLocked, "test_a_locked_path_is_never_evicted"),
        (EvictsRoots, "test_evict_takes_leaves_before_what_they_stand_on"),
        (EvictsNewest, "test_evict_follows_the_strategy"),
        (EvictsOnePageLess, "test_evict_gives_at_least_what_was_asked"),
        (ProbeCountsAsAccess, "test_probe_changes_nothing"),
        (NeverChangesVersion, "test_version_grows_with_every_change_of_content"),
        (KeepsDuplicates, "test_insert_keeps_what_it_holds_and_takes_the_rest"),
        (CountsOneLock, "test_n_locks_need_n_unlocks"),
        (CountsEachChunk, "test_a_request_counts_once_however_many_chunks_it_takes"),
        (SendsNoEvents, "test_events_tell_the_content"),
    ],
)
def test_a_faulty_cache_is_found(broken: Callable[[CacheContext], PrefixCache], sentence: str):
    class Kit(PrefixCacheConformance):
        parameters: ClassVar[dict[str, Any]] = {"page_size": (1, 4)}
        max_examples = 1

        def create(self, context):
            return broken(context)

    assert fails(Kit, sentence)


def kit_of(make: Callable[[CacheContext], PrefixCache], granularity: int) -> type[PrefixCacheConformance]:
    class Kit(PrefixCacheConformance):
        parameters: ClassVar[dict[str, Any]] = {"page_size": (1, 4)}
        granularity_tokens = granularity
        max_examples = 1

        def create(self, context):
            return make(context)

    return Kit


@pytest.mark.parametrize(
    ("block_tokens", "granularity_tokens", "is_found"), [(64, 64, False), (64, 1, True), (64, 32, True), (16, 64, True)]
)
def test_the_declared_granularity_of_a_kit_must_be_that_of_the_cache(block_tokens, granularity_tokens, is_found):
    kit = kit_of(lambda context: NaiveCache(context, block_tokens // context.page_size), granularity_tokens)
    assert bool(failed(kit)) is is_found


def test_the_sizes_of_blocks_and_pages_need_not_be_multiples_of_each_other():
    kit = kit_of(lambda context: NaiveCache(context, 6 if context.page_size == 1 else 3), granularity=6)
    assert failed(kit) == set()


@pytest.mark.parametrize("broken", [MatchesOnePageLess, EvictsNewest, ExposesTheCallersKey, NeverChangesVersion])
def test_a_faulty_cache_with_coarser_blocks_is_found(broken: Callable[..., PrefixCache]):
    assert failed(kit_of(lambda context: broken(context, 8 // context.page_size), granularity=8))


class Impure(OldestAccessFirst):
    calls = 0

    def priority(self, node):
        self.calls += 1
        return (node.last_access, self.calls)


class NotANumber(OldestAccessFirst):
    def priority(self, node):
        return (float("nan"),)


class DividesByHits(OldestAccessFirst):
    def priority(self, node):
        return (node.last_access / node.hits,)


class KeepsEveryNode(OldestAccessFirst):
    def __init__(self):
        self.seen = set()

    def on_insert(self, node: NodeStats) -> None:
        self.seen.add(node)


class DependsOnOtherNodes(OldestAccessFirst):
    num_nodes = 0

    def on_insert(self, node: NodeStats) -> None:
        self.num_nodes += 1

    def priority(self, node):
        return (node.last_access * self.num_nodes, self.num_nodes)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Impure, "test_priority_is_pure"),
        (NotANumber, "test_priorities_compare_with_each_other"),
        (DividesByHits, "test_no_stats_raise"),
        (KeepsEveryNode, "test_state_ends_with_the_node"),
        (DependsOnOtherNodes, "test_a_priority_changes_only_through_its_own_node"),
    ],
)
def test_a_faulty_strategy_is_found(broken: Callable[[], EvictionStrategy], sentence: str):
    class Kit(EvictionStrategyConformance):
        max_examples = 1

        def create(self, context):
            return broken()

    assert fails(Kit, sentence)


class DropsARequest(SchedulingPolicy):
    def order(self, waiting, now):
        return list(waiting[1:])


class SortsInPlace(SchedulingPolicy):
    max_wait_s = 1.0

    def order(self, waiting, now):
        waiting.sort(key=lambda request: request.num_tokens)
        return list(waiting)


class ReversesTheOrder(SchedulingPolicy):
    def order(self, waiting, now):
        return list(waiting)[::-1]


class DependsOnTheInstance(SchedulingPolicy):
    max_wait_s = 1.0
    num_created = 0

    def __init__(self):
        DependsOnTheInstance.num_created += 1
        self.shift = DependsOnTheInstance.num_created

    def order(self, waiting, now):
        shift = self.shift % max(1, len(waiting))
        return [*waiting[shift:], *waiting[:shift]]


class AssumesGroups(SchedulingPolicy):
    """Assumes that every request is in a group."""

    max_wait_s = 1.0

    def order(self, waiting, now):
        return sorted(waiting, key=lambda request: request.group.num_tokens)


class EmptiesTheQueue(SchedulingPolicy):
    def order(self, waiting, now):
        return [waiting.pop(0) for _ in range(len(waiting))]


class RepeatsARequest(SchedulingPolicy):
    def order(self, waiting, now):
        waiting[:] = waiting[:1] * len(waiting)
        return waiting


class PreemptsEqualPriorities(SchedulingPolicy):
    preemption = Preemption(min_difference=0)

    def order(self, waiting, now):
        return list(waiting)


class SetsPreemptionToTrue(PreemptsEqualPriorities):
    preemption = True


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (AssumesGroups, "test_order_is_a_permutation"),
        (PreemptsEqualPriorities, "test_preemption_needs_a_higher_priority"),
        (SetsPreemptionToTrue, "test_preemption_needs_a_higher_priority"),
        (EmptiesTheQueue, "test_order_returns_a_new_list_and_changes_nothing"),
        (RepeatsARequest, "test_order_is_a_permutation"),
        (DropsARequest, "test_order_is_a_permutation"),
        (SortsInPlace, "test_order_returns_a_new_list_and_changes_nothing"),
        (SortsInPlace, "test_order_takes_any_sequence"),
        (ReversesTheOrder, "test_who_reorders_says_how_long_one_may_wait"),
        (DependsOnTheInstance, "test_order_is_deterministic"),
    ],
)
def test_a_faulty_policy_is_found(broken: Callable[[], SchedulingPolicy], sentence: str):
    class Kit(SchedulingPolicyConformance):
        def create(self, context):
            return broken()

    assert fails(Kit, sentence)


# -- The package


@pytest.mark.parametrize("name", graftlm.testing.__all__)
def test_every_public_name_can_be_imported(name: str):
    assert getattr(graftlm.testing, name).__name__ == name


def test_kits_of_host_side_contracts_import_no_torch():
    program = (
        "import sys; from graftlm.testing import DrafterConformance, EvictionStrategyConformance, NaiveCache, "
        "PrefixCacheConformance, "
        "SchedulingPolicyConformance, run_conformance; "
        "print({'torch', 'pytest', 'hypothesis'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr.strip()) == ("set()", "")
