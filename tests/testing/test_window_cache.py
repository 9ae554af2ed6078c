"""The kit of caches that keep windows apart finds caches that do not."""

from typing import ClassVar
from unittest import SkipTest

import pytest

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.testing import WindowCacheConformance, run_conformance
from graftlm_cache.radix import RadixCache
from graftlm_cache.swa_radix import SWARadixCache


class KitOfForgetful(WindowCacheConformance):
    """A cache that never looks whether windows are there."""

    parameters: ClassVar = {"page_size": (1,), "reach_pages": (2,)}

    def create(self, context: CacheContext) -> PrefixCache:
        return RadixCache(context)

    def test_random_histories_with_windows(self, page_size: int, reach_pages: int) -> None:
        """They would fail too, but finding the shortest history takes long."""
        raise SkipTest("slow")


class Careless(SWARadixCache):
    def lock_window(self, handle, num_pages):
        pass

    def unlock_window(self, handle, num_pages):
        pass


class KitOfCareless(KitOfForgetful):
    """A cache that gives up windows which requests need."""

    def create(self, context: CacheContext) -> PrefixCache:
        return Careless(context, context.window)


class KitOfSWARadix(KitOfForgetful):
    def create(self, context: CacheContext) -> PrefixCache:
        return SWARadixCache(context, context.window)


@pytest.mark.parametrize(
    ("kit", "failures"),
    [
        (KitOfSWARadix, set()),
        (KitOfCareless, {"test_a_locked_window_stays"}),
        (
            KitOfForgetful,
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
def test_the_kit_finds_what_is_wrong(kit, failures):
    failed = {result.name.split("[")[0] for result in run_conformance(kit) if result.error is not None}
    assert failed == failures
