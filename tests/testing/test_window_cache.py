"""The kits of caches with separate windows or stored states find caches that handle these wrongly."""

from typing import ClassVar
from unittest import SkipTest

import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.testing import StateCacheConformance, WindowCacheConformance, run_conformance
from graftlm_cache.radix import RadixCache
from graftlm_cache.state_radix import StateRadixCache
from graftlm_cache.swa_radix import SWARadixCache


class KitOfRadix(WindowCacheConformance):
    """A cache that ignores windows."""

    parameters: ClassVar = {"page_size": (1,), "reach_pages": (2,)}

    def create(self, context: CacheContext) -> PrefixCache:
        return RadixCache(context)

    def test_random_histories_with_windows(self, page_size: int, reach_pages: int) -> None:
        """Would fail too, but the search for the shortest history is slow."""
        raise SkipTest("slow")


class LocksNoWindows(SWARadixCache):
    def lock_window(self, handle, num_pages):
        pass

    def unlock_window(self, handle, num_pages):
        pass


class KitWithoutWindowLocks(KitOfRadix):
    """A cache that frees windows that requests still need."""

    def create(self, context: CacheContext) -> PrefixCache:
        return LocksNoWindows(context, context.window)


class KitOfSWARadix(KitOfRadix):
    def create(self, context: CacheContext) -> PrefixCache:
        return SWARadixCache(context, context.window)


@pytest.mark.parametrize(
    ("kit", "failures"),
    [
        (KitOfSWARadix, set()),
        (KitWithoutWindowLocks, {"test_a_locked_window_stays"}),
        (
            KitOfRadix,
            {
                "test_a_match_ends_where_its_window_is_whole",
                "test_walk_shows_what_has_window_pages",
                "test_a_locked_window_stays",
                "test_offered_window_pages_are_taken_over",
                "test_lost_windows_shorten_matches",
            },
        ),
    ],
)
def test_the_kit_finds_faulty_caches(kit, failures):
    failed = {result.name.split("[")[0] for result in run_conformance(kit) if result.error is not None}
    assert failed == failures


class StatesIgnored(StateCacheConformance):
    """A cache that ignores states."""

    def create(self, context: CacheContext) -> PrefixCache:
        return RadixCache(context)


class StatesRespected(StateCacheConformance):
    def create(self, context: CacheContext) -> PrefixCache:
        return StateRadixCache(context, context.states)


@pytest.mark.parametrize(
    ("kit", "failures"),
    [
        (StatesRespected, set()),
        (
            StatesIgnored,
            {
                "test_a_match_ends_at_the_deepest_state",
                "test_a_resumed_match_needs_a_state_only_at_its_end",
                "test_inserts_do_not_depend_on_states",
                "test_the_version_grows_with_the_states",
                "test_walk_counts_states",
            },
        ),
    ],
)
def test_the_kit_finds_caches_that_ignore_states(kit, failures):
    failed = {result.name.split("[")[0] for result in run_conformance(kit) if result.error is not None}
    assert failed == failures
