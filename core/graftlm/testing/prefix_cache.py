"""The conformance kit for prefix caches."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, ClassVar
from unittest import SkipTest

import numpy as np

from graftlm.contracts import CacheContext, EvictionStrategy, PrefixCache, PrefixKey
from graftlm.testing.cache_rig import CacheRig, as_list
from graftlm.testing.cache_views import BlockView, LentArrays
from graftlm.testing.conformance import Conformance
from graftlm.testing.event_mirror import EventMirror
from graftlm.testing.recording import OldestAccessFirst, RestlessOrder, TickingClock

__all__ = ["PrefixCacheConformance"]


class PrefixCacheConformance(Conformance, ABC):
    """The kit for the contract `PrefixCache`.

        class TestMyCache(PrefixCacheConformance):
            def create(self, context):
                return MyCache(context)

    `test_any_history_agrees_with_a_dictionary` needs the `hypothesis` package.

    Attributes:
        parameters: `page_size` is the number of tokens in a page. Override this if the cache does not support all of
            the sizes.
        reuses: the provider's `CacheCapabilities.reuses`; if it is false, tests of found pages are skipped.
        granularity_tokens: the provider's `CacheCapabilities.granularity_tokens`. If a cache only shares prefixes in
            multiples of, for example, 64 tokens, the tests use blocks instead of pages. The number of tokens in a
            block is the least common multiple of the granularity and the page size.
        max_examples: number of random sequences of cache calls that `test_any_history_agrees_with_a_dictionary` runs,
            for each page size and each length of a sequence.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"page_size": (1, 4, 16)}
    reuses: ClassVar[bool] = True
    granularity_tokens: ClassVar[int] = 1
    max_examples: ClassVar[int] = 25

    @abstractmethod
    def create(self, context: CacheContext) -> PrefixCache:
        """Return a new, empty cache."""

    def rig(self, page_size: int, strategy: EvictionStrategy | None = None) -> CacheRig:
        """Return a test rig with a new cache. A page of the rig is a block of the cache.

        After each call of the cache, the rig overwrites all passed arrays, as any caller may.
        """
        return CacheRig(
            lambda context: self._viewed(context, page_size), lcm(page_size, self.granularity_tokens), strategy
        )

    def _viewed(self, context: CacheContext, page_size: int) -> PrefixCache:
        """Return a new cache for `page_size`. If the rig's pages are larger, a wrapper presents blocks as pages."""
        cache = LentArrays(self.create(replace(context, page_size=page_size)))
        if context.page_size == page_size:
            return cache
        return BlockView(cache, context.page_size // page_size, page_size)

    def reusing_rig(self, page_size: int) -> CacheRig:
        """Return a test rig like `rig`; skip the test if the cache does not reuse prefixes."""
        if not self.reuses:
            raise SkipTest("the cache does not reuse")
        return self.rig(page_size)

    # -- match and insert

    def test_a_new_cache_is_empty(self, page_size: int) -> None:
        """A new cache is empty: `match` finds nothing, `walk` yields nothing, and all counts are 0."""
        rig = self.rig(page_size)
        match = rig.cache.match(rig.key(1, 2))
        assert as_list(match.pages) == []
        assert match.handle.num_pages == 0
        assert (rig.cache.evictable_pages, rig.cache.locked_pages, rig.cached_pages()) == (0, 0, [])
        assert as_list(rig.cache.evict(10)) == []
        assert as_list(rig.cache.reset()) == []

    def test_match_finds_the_longest_prefix_in_whole_pages(self, page_size: int) -> None:
        """`match` returns the pages of the longest cached prefix, in whole pages."""
        rig = self.reusing_rig(page_size)
        stored = as_list(rig.insert(rig.key(1, 2, 3, 4)).pages)
        for key, num_shared in [
            (rig.key(1, 2, 3, 4, 5), 4),
            (rig.key(1, 2, 3, 4), 4),
            (rig.key(1, 2, 3, 9), 3),
            (rig.key(1, 9, 3, 4), 1),
            (rig.key(9, 2, 3, 4), 0),
            (rig.key(1, 2, tail=rig.page_size - 1), 2),
            (rig.key(), 0),
        ]:
            match = rig.cache.match(key)
            assert as_list(match.pages) == stored[:num_shared], f"tokens {key.token_ids.tolist()}"
            assert match.handle.num_pages == num_shared

    def test_match_after_insert_returns_what_insert_returned(self, page_size: int) -> None:
        """If `insert` took all pages of a new key, `match` of this key returns the pages that `insert` returned."""
        rig = self.reusing_rig(page_size)
        key = rig.key(1, 2, 3)
        result = rig.insert(key)
        assert result.cached_pages == result.handle.num_pages == 3
        assert rig.matched(key) == as_list(result.pages)

    def test_insert_keeps_what_it_holds_and_takes_the_rest(self, page_size: int) -> None:
        """`insert` takes the caller's pages from `existing_pages` to `cached_pages` and keeps its own for the rest."""
        rig = self.reusing_rig(page_size)
        start = rig.cache.match(rig.key(1)).handle
        rig.cache.lock(start)
        first = as_list(rig.insert(rig.key(1, 2, 3)).pages)
        own = rig.new_pages(4)
        result = rig.cache.insert(rig.key(1, 2, 8, 9), own, start)
        assert (result.existing_pages, result.cached_pages) == (2, 4)
        assert as_list(result.pages) == [*first[:2], *own[2:].tolist()]
        assert rig.cached_pages() == sorted([*first, *own[2:].tolist()])

    def test_insert_of_what_is_held_takes_nothing(self, page_size: int) -> None:
        """`insert` of a prefix that is already cached takes no page: no page has two owners."""
        rig = self.reusing_rig(page_size)
        start = rig.cache.match(rig.key(1)).handle
        first = rig.insert(rig.key(1, 2, 3))
        second = rig.cache.insert(rig.key(1, 2), rig.new_pages(2), start)
        assert (second.existing_pages, second.cached_pages, second.handle.num_pages) == (2, 2, 2)
        assert as_list(second.pages) == as_list(first.pages)[:2]
        assert rig.cached_pages() == as_list(first.pages)

    def test_insert_may_refuse_but_not_lose_pages(self, page_size: int) -> None:
        """A cache may take fewer pages than offered, or none. Pages from `cached_pages` on stay with the caller."""
        rig = self.rig(page_size)
        result = rig.insert(rig.key(1, 2, 3))
        assert 0 == result.existing_pages <= result.cached_pages <= 3
        assert result.handle.num_pages == result.cached_pages
        assert as_list(result.pages) == rig.cached_pages() == list(range(result.cached_pages))

    def test_a_trailing_partial_page_is_ignored(self, page_size: int) -> None:
        """The cache only stores whole pages; it ignores tokens after the last whole page."""
        rig = self.reusing_rig(page_size)
        result = rig.insert(rig.key(1, 2, tail=rig.page_size - 1))
        assert result.cached_pages == 2
        assert sum(len(view.token_ids) for view in rig.cache.walk()) == 2 * rig.page_size

    def test_the_cache_keeps_copies(self, page_size: int) -> None:
        """Changes to a key or to pages after a call do not change the contents of the cache."""
        rig = self.reusing_rig(page_size)
        cases: list[tuple[tuple[int, ...], list[int]]] = [((1, 2), [0, 1]), ((1, 3), [0, 2]), ((1, 2, 4), [0, 1, 3])]
        for letters, _ in cases:
            rig.insert(rig.key(*letters))  # splits one node, and extends another one
        for letters, expected in cases:
            assert rig.matched(rig.key(*letters)) == expected, f"the cache keeps an array of its caller: {letters}"
        runs: dict[int, list[int]] = {}
        for view in rig.cache.walk():
            front = [] if view.parent_id is None else runs[view.parent_id]
            runs[view.node_id] = front + view.token_ids.tolist()
        prompts = [rig.key(*letters).token_ids.tolist() for letters, _ in cases]
        for tokens in runs.values():
            assert any(whole[: len(tokens)] == tokens for whole in prompts), "walk() shows tokens of an overwritten key"
        replayed = EventMirror()
        for event in rig.events:
            replayed(event)
        for node_id, node in replayed.nodes.items():
            assert np.array_equal(node.token_ids, rig.mirror.nodes[node_id].token_ids), (
                "an event shows tokens of an overwritten key"
            )

    def test_namespaces_never_share(self, page_size: int) -> None:
        """Namespaces never share pages."""
        rig = self.reusing_rig(page_size)
        plain = as_list(rig.insert(rig.key(1, 2)).pages)
        assert rig.matched(rig.key(1, 2, namespace="tenant")) == []
        tenant = rig.insert(rig.key(1, 2, namespace="tenant"))
        assert tenant.existing_pages == 0
        assert not set(as_list(tenant.pages)) & set(plain)
        assert {view.namespace for view in rig.views_of(tenant.pages)} == {"tenant"}
        assert rig.matched(rig.key(1, 2)) == plain

    # -- resuming

    def test_resuming_gives_what_matching_from_the_start_would(self, page_size: int) -> None:
        """A match with `resume` returns the same pages as a match from the start, without those before the handle."""
        rig = self.reusing_rig(page_size)
        key = rig.key(1, 2, 3, 4, 5)
        whole = as_list(rig.insert(key).pages)
        for num_resumed in range(6):
            handle = rig.hold(rig.key(*range(1, num_resumed + 1)))
            assert handle.num_pages == num_resumed
            assert rig.matched(key, resume=handle) == whole[num_resumed:]
            rig.cache.unlock(handle)

    def test_a_request_counts_once_however_many_chunks_it_takes(self, page_size: int) -> None:
        """`match` counts a hit for each node on its path, but not for nodes before a resumed handle."""
        rig = self.reusing_rig(page_size)
        pages = as_list(rig.insert(rig.key(1, 2, 3, 4)).pages)
        handle = rig.hold(rig.key(1, 2))
        rig.cache.match(rig.key(1, 2, 3, 4), resume=handle)
        assert [view.stats.hits for view in rig.views_of(pages)] == [1] * len(rig.views_of(pages))
        rig.cache.match(rig.key(1, 2))
        assert {view.stats.hits for view in rig.views_of(pages[:2])} == {2}
        assert {view.stats.hits for view in rig.views_of(pages[2:])} == {1}

    # -- locks

    def test_a_locked_path_is_never_evicted(self, page_size: int) -> None:
        """`evict(n)` never returns a page on a locked path."""
        rig = self.reusing_rig(page_size)
        pages = as_list(rig.insert(rig.key(1, 2, 3, 4)).pages)
        handle = rig.hold(rig.key(1, 2))
        assert (rig.cache.evictable_pages, rig.cache.locked_pages) == (2, 2)
        assert sorted(as_list(rig.cache.evict(100))) == pages[2:]
        assert rig.matched(rig.key(1, 2, 3, 4)) == pages[:2]
        rig.cache.unlock(handle)
        assert (rig.cache.evictable_pages, rig.cache.locked_pages) == (2, 0)
        assert sorted(as_list(rig.cache.evict(100))) == pages[:2]

    def test_a_path_can_be_locked_after_eviction_looked_at_it(self, page_size: int) -> None:
        """A path that is locked after an earlier eviction is not evicted either."""
        rig = self.reusing_rig(page_size)
        _, kept = (rig.insert(rig.key(letter)).handle for letter in (1, 2))
        rig.cache.evict(1)
        rig.cache.lock(kept)
        assert as_list(rig.cache.evict(100)) == []
        rig.cache.unlock(kept)
        assert len(as_list(rig.cache.evict(100))) == 1

    def test_n_locks_need_n_unlocks(self, page_size: int) -> None:
        """A handle that was locked n times needs n unlocks."""
        rig = self.reusing_rig(page_size)
        handle = rig.insert(rig.key(1, 2)).handle
        for _ in range(3):
            rig.cache.lock(handle)
        for _ in range(3):
            assert as_list(rig.cache.evict(100)) == []
            rig.cache.unlock(handle)
        assert len(as_list(rig.cache.evict(100))) == 2

    def test_a_path_stays_locked_while_any_handle_below_is(self, page_size: int) -> None:
        """A path stays locked as long as a handle on or below it is locked."""
        rig = self.reusing_rig(page_size)
        rig.insert(rig.key(1, 2, 3, 4))
        lower, upper = rig.hold(rig.key(1, 2, 3)), rig.hold(rig.key(1))
        rig.cache.unlock(upper)
        assert rig.cache.locked_pages == 3
        rig.cache.unlock(lower)
        assert rig.cache.locked_pages == 0

    def test_the_start_of_a_prompt_can_be_locked(self, page_size: int) -> None:
        """The handle of an empty match can be locked. It protects no pages and stays valid."""
        rig = self.rig(page_size)
        handle = rig.hold(rig.key(1))
        rig.insert(rig.key(1, 2))
        assert rig.cache.locked_pages == 0
        rig.cache.evict(100)
        result = rig.insert(rig.key(1, 2), handle)
        assert result.existing_pages == 0
        rig.cache.unlock(handle)
        assert rig.cache.locked_pages == 0

    def test_a_locked_handle_survives_splits(self, page_size: int) -> None:
        """A locked handle stays valid and keeps its `num_pages` when other keys split its path."""
        rig = self.reusing_rig(page_size)
        key = rig.key(1, 2, 3, 4)
        handle = rig.insert(key).handle
        rig.cache.lock(handle)
        for num_shared in (1, 3, 2):
            rig.insert(rig.key(*[1, 2, 3][:num_shared], 9))
            assert handle.num_pages == 4
            assert rig.cache.locked_pages == 4
        assert rig.matched(rig.key(1, 2, 3, 4, 5), resume=handle) == []
        grown = rig.insert(rig.key(1, 2, 3, 4, 5), handle)
        assert (grown.existing_pages, grown.cached_pages) == (4, 5)
        rig.cache.unlock(handle)
        assert rig.cache.locked_pages == 0

    # -- eviction

    def test_evict_gives_at_least_what_was_asked(self, page_size: int) -> None:
        """`evict(n)` returns at least min(n, evictable_pages) pages, and these pages are no longer cached."""
        rig = self.reusing_rig(page_size)
        for letter in range(1, 6):
            rig.insert(rig.key(letter, 2, 3))
        everything = rig.cached_pages()
        handed_back: list[int] = []
        for asked in (0, 1, 4, 100):
            expected = min(asked, rig.cache.evictable_pages)
            pages = as_list(rig.cache.evict(asked))
            handed_back += pages
            assert len(pages) >= expected
            assert sorted(handed_back + rig.cached_pages()) == everything
            assert rig.cache.evictable_pages == len(rig.cached_pages())
        assert rig.cached_pages() == []

    def test_evict_follows_the_strategy(self, page_size: int) -> None:
        """`evict` takes leaves in the order of the strategy's priorities."""
        rig = self.reusing_rig(page_size)
        prompts = {letter: as_list(rig.insert(rig.key(letter, 1)).pages) for letter in (1, 2, 3)}
        rig.cache.match(rig.key(1, 1))
        for letter in (2, 3, 1):
            gone = as_list(rig.cache.evict(2))
            assert sorted(gone) == prompts[letter]

    def test_the_age_of_what_was_evicted_is_told(self, page_size: int) -> None:
        """`eviction_age_s` is None, or the time from the last use of the last evicted node until its eviction."""
        rig = self.reusing_rig(page_size)
        assert rig.cache.eviction_age_s is None
        rig.insert(rig.key(1))
        inserted_s = next(rig.cache.walk()).stats.last_access
        rig.insert(rig.key(2))
        rig.cache.evict(1)
        age_s = rig.cache.eviction_age_s
        assert age_s is None or 0 < age_s <= rig.clock() - inserted_s

    def test_evict_takes_leaves_before_what_they_stand_on(self, page_size: int) -> None:
        """`evict` takes leaves before their ancestors."""
        rig = self.reusing_rig(page_size)
        trunk = as_list(rig.insert(rig.key(1, 2)).pages)
        branches = [as_list(rig.insert(rig.key(1, 2, letter)).pages)[-1] for letter in (3, 4)]
        order = [page for _ in range(4) for page in as_list(rig.cache.evict(1))]
        assert sorted(order) == sorted([*trunk, *branches])
        assert max(order.index(page) for page in branches) < min(order.index(page) for page in trunk)

    def test_a_leaf_that_grew_is_no_leaf(self, page_size: int) -> None:
        """`evict` takes leaves first, also if a node was a leaf at an earlier eviction and has a child now."""
        rig = self.reusing_rig(page_size)
        _, trunk = (rig.insert(rig.key(letter)) for letter in (1, 2))
        rig.cache.evict(1)
        leaf = rig.insert(rig.key(2, 3), trunk.handle)
        assert as_list(rig.cache.evict(1)) == as_list(leaf.pages)
        assert as_list(rig.cache.evict(1)) == as_list(trunk.pages)

    def test_what_reset_took_is_not_evicted_again(self, page_size: int) -> None:
        """`evict` does not return pages again that `reset` has returned."""
        rig = self.reusing_rig(page_size)
        for letter in (1, 2, 3):
            rig.insert(rig.key(letter))
        rig.cache.evict(1)
        assert len(as_list(rig.cache.reset())) == 2
        assert as_list(rig.cache.evict(100)) == []

    def test_reset_forgets_all_but_locked_paths(self, page_size: int) -> None:
        """`reset` evicts everything that is not locked; locked paths stay."""
        rig = self.reusing_rig(page_size)
        kept = as_list(rig.insert(rig.key(1, 2)).pages)
        gone = as_list(rig.insert(rig.key(5, 6, namespace="tenant")).pages)
        gone += as_list(rig.insert(rig.key(1, 2, 3)).pages)
        handle = rig.hold(rig.key(1, 2))
        assert sorted(as_list(rig.cache.reset())) == sorted(gone)
        assert rig.cached_pages() == kept
        rig.cache.unlock(handle)
        assert sorted(as_list(rig.cache.reset())) == kept
        assert (rig.cached_pages(), rig.cache.evictable_pages) == ([], 0)

    # -- pins

    def pinning_rig(self, page_size: int) -> CacheRig:
        """Return a rig in which (1, 2) is pinned for 1,000 s; skip the test if the cache does not support pins."""
        rig = self.reusing_rig(page_size)
        rig.insert(rig.key(1, 2))
        if not rig.cache.pin(rig.key(1, 2, 3), 1000.0):
            raise SkipTest("the cache does not pin")
        return rig

    def test_a_pinned_prefix_outlives_everything_else(self, page_size: int) -> None:
        """`evict` takes pinned prefixes after all others. Pinned pages count as evictable."""
        rig = self.pinning_rig(page_size)
        for letter in (5, 6):
            rig.insert(rig.key(letter))
        assert (rig.cache.evictable_pages, rig.cache.locked_pages) == (4, 0)
        assert sorted(as_list(rig.cache.evict(2))) == [2, 3]
        assert rig.cache.probe(rig.key(1, 2)) == 2
        assert sorted(as_list(rig.cache.evict(1)))[-1:] == [1]
        assert rig.cache.evictable_pages + len(rig.cached_pages()) in (0, 2)

    def test_a_pin_ends_with_its_time_or_unpin(self, page_size: int) -> None:
        """A pin ends after its time, or with `unpin`."""
        for ended_by_time in (True, False):
            rig = self.pinning_rig(page_size)
            rig.insert(rig.key(5))
            if ended_by_time:
                rig.clock.now += 1001.0
            else:
                assert rig.cache.unpin(rig.key(1, 2, 3))
            assert not set(as_list(rig.cache.evict(1))) & {2}

    def test_only_what_is_pinned_can_be_unpinned(self, page_size: int) -> None:
        """`unpin` returns whether exactly this key was pinned."""
        rig = self.pinning_rig(page_size)
        assert not rig.cache.unpin(rig.key(1, 2))
        assert not rig.cache.unpin(rig.key(1, 2, 3, namespace="tenant"))
        assert rig.cache.pin(rig.key(9), 1.0) == 0
        assert rig.cache.unpin(rig.key(1, 2, 3))
        assert not rig.cache.unpin(rig.key(1, 2, 3))

    def test_the_pin_that_ends_first_goes_first(self, page_size: int) -> None:
        """If only pinned prefixes are left, `evict` first takes the one whose pin ends first."""
        rig = self.pinning_rig(page_size)
        rig.insert(rig.key(5))
        rig.cache.pin(rig.key(5), 10.0)
        rig.insert(rig.key(6))
        assert as_list(rig.cache.evict(1)) == [3]
        assert as_list(rig.cache.evict(1)) == [2]

    # -- reading

    def test_probe_changes_nothing(self, page_size: int) -> None:
        """`probe` changes neither access times nor hits nor the structure of the cache."""
        rig = self.reusing_rig(page_size)
        rig.insert(rig.key(1, 2, 3, 4))
        before, version, hits = rig.snapshot(), rig.cache.version, rig.strategy.num_hits
        for letters, expected in [((1, 2), 2), ((1, 2, 3, 4, 5), 4), ((9,), 0), ((), 0)]:
            assert rig.cache.probe(rig.key(*letters)) == expected
        assert rig.cache.probe(rig.key(1, 2, namespace="tenant")) == 0
        assert (rig.snapshot(), rig.cache.version, rig.strategy.num_hits) == (before, version, hits)

    def test_continuation_changes_nothing(self, page_size: int) -> None:
        """`continuation` changes nothing: neither recency nor hits nor structure."""
        rig = self.reusing_rig(page_size)
        rig.insert(rig.key(1, 2, 3, 4))
        rig.insert(rig.key(1, 2, 5))
        before, version, hits = rig.snapshot(), rig.cache.version, rig.strategy.num_hits
        for key in (rig.key(1, 2, 3, 4), rig.key(1, 2, 9), rig.key(1, 2, namespace="tenant")):
            for length in range(len(key.token_ids) + 1):
                rig.cache.continuation(replace(key, token_ids=key.token_ids[:length]), 3)
        assert (rig.snapshot(), rig.cache.version, rig.strategy.num_hits) == (before, version, hits)

    def test_a_continuation_is_what_was_inserted_after_the_key(self, page_size: int) -> None:
        """The key followed by its continuation is the start of an inserted key of the namespace."""
        rig = self.rig(page_size)
        letters: dict[str, list[tuple[int, ...]]] = {"": [(1, 2, 3, 4), (1, 2, 5), (6,)], "tenant": [(1, 2, 7), (8,)]}
        inserted = {
            namespace: [rig.key(*some, namespace=namespace) for some in group] for namespace, group in letters.items()
        }
        for key in [key for group in inserted.values() for key in group]:
            rig.insert(key)
        asked = [rig.key(*some, tail=1) for group in letters.values() for some in group]
        for namespace in ("", "tenant", "nobody"):
            texts = [key.token_ids.tolist() for key in inserted.get(namespace, ())]
            for key in asked:
                for length in range(len(key.token_ids) + 1):
                    for num_tokens in (0, 1, rig.page_size + 1, 1000):
                        part = PrefixKey(key.token_ids[:length].copy(), namespace)
                        found = as_list(rig.cache.continuation(part, num_tokens))
                        assert len(found) <= num_tokens, f"{len(found)} tokens, of which {num_tokens} were asked for"
                        whole = part.token_ids.tolist() + found
                        assert not found or any(text[: len(whole)] == whole for text in texts), (
                            f"tokens {found} were not inserted after {part.token_ids.tolist()} in {namespace!r}"
                        )
        rig.cache.reset()
        assert as_list(rig.cache.continuation(rig.key(1), 9)) == [], "reset() left a continuation"

    def test_version_grows_with_every_change_of_content(self, page_size: int) -> None:
        """`version` grows whenever the result of `probe` may have changed."""
        rig = self.reusing_rig(page_size)
        versions = [rig.cache.version]
        for change in (
            lambda: rig.insert(rig.key(1, 2)),
            lambda: rig.insert(rig.key(1, 2, 3)),
            lambda: rig.cache.evict(1),
            lambda: rig.cache.reset(),
        ):
            change()
            versions.append(rig.cache.version)
        assert versions == sorted(set(versions))

    def test_walk_shows_parents_first_and_places_every_node(self, page_size: int) -> None:
        """`walk` yields every node once, parents before children, with correct `tokens` and `depth`."""
        rig = self.reusing_rig(page_size)
        for letters in [(1, 2, 3), (1, 2, 4), (1, 5), (6,)]:
            rig.insert(rig.key(*letters))
        ends: dict[int, int] = {}
        for view in rig.cache.walk():
            depth = 0 if view.parent_id is None else ends[view.parent_id]
            assert len(view.token_ids) == len(view.pages) * rig.page_size == view.stats.tokens
            assert view.stats.depth == depth
            assert view.node_id not in ends
            ends[view.node_id] = depth + len(view.token_ids)

    def test_stats_tell_what_happened(self, page_size: int) -> None:
        """A node's stats have its `created`, `last_access` and `hits`, and the highest `priority` of its requests."""
        rig = self.reusing_rig(page_size)
        pages = rig.insert(rig.key(1, 2, priority=3)).pages
        born = rig.clock.now
        rig.cache.match(rig.key(1, 2, priority=1))
        for view in rig.views_of(pages):
            assert view.stats.created <= born < view.stats.last_access <= rig.clock.now
            assert (view.stats.hits, view.stats.priority) == (1, 3)
        rig.insert(rig.key(1, 2, 3, priority=5))
        assert {view.stats.priority for view in rig.cache.walk()} == {5}

    def test_the_strategy_hears_of_every_node(self, page_size: int) -> None:
        """For each node, the cache calls `on_insert` once before all other hooks, and `on_evict` once after them."""
        rig = self.reusing_rig(page_size)
        rig.insert(rig.key(1, 2, 3))
        kept = [view.stats for view in rig.cache.walk()]
        rig.insert(rig.key(1, 5))
        assert {view.stats for view in rig.cache.walk()} == rig.strategy.live >= set(kept)
        rig.cache.evict(1)
        rig.cache.reset()
        assert rig.strategy.live == set()

    def test_events_tell_the_content(self, page_size: int) -> None:
        """A replay of the events gives the tree that `walk` yields."""
        rig = self.reusing_rig(page_size)
        rig.insert(rig.key(1, 2, 3))
        rig.insert(rig.key(1, 2, 3))
        assert sum(event.num_tokens for event in rig.events) == 3 * rig.page_size
        rig.insert(rig.key(1, 4, namespace="tenant"))
        rig.check_mirror()
        handle = rig.hold(rig.key(1))
        rig.check_mirror()
        rig.cache.evict(1)
        rig.check_mirror()
        rig.cache.reset()
        rig.check_mirror()
        rig.cache.unlock(handle)
        rig.cache.reset()
        assert rig.mirror.nodes == {}

    def test_nobody_needs_to_listen(self, page_size: int) -> None:
        """The cache works without a listener, when `on_event` is None."""
        rig = self.rig(page_size)
        cache = self._viewed(CacheContext(rig.page_size, OldestAccessFirst(), TickingClock()), page_size)
        key = rig.key(1, 2)
        cache.insert(key, rig.new_pages(2), cache.match(key).handle)
        cache.evict(1)
        cache.reset()
        assert cache.evictable_pages == cache.locked_pages == 0

    # -- everything at once

    def test_any_history_agrees_with_a_dictionary(self, page_size: int) -> None:
        """After each step of random histories, the cache agrees with a plain dictionary."""
        from graftlm.testing.prefix_cache_machine import check_random_histories

        check_random_histories(lambda: self.rig(page_size, RestlessOrder()), self.max_examples)
