"""The conformance kit for prefix caches with window pages."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.testing.cache_rig import CacheRig, as_list
from graftlm.testing.cache_views import LentArrays
from graftlm.testing.conformance import Conformance
from graftlm.testing.window_cache_machine import FakeWindows, check_random_windows

__all__ = ["WindowCacheConformance"]

#: Cases with a prompt of eight pages: (pages with a window page ("1"), `reach_pages`, length of the match in pages).
_MATCHES = [
    ("11111111", 3, 8),
    ("00000111", 3, 8),
    ("00000011", 3, 0),
    ("00111011", 3, 5),
    ("01110000", 3, 4),
    ("11000000", 3, 2),
    ("11000000", 0, 8),
    ("00000000", 1, 0),
    ("10000001", 1, 8),
]


class WindowCacheConformance(Conformance, ABC):
    """The kit for window pages, for caches with the capabilities `window` and `reuses`.

    `PrefixCacheConformance` checks the other parts of the contract `PrefixCache`.

        class TestMyCacheWithWindows(WindowCacheConformance):
            def create(self, context):
                return MyCache(context)

    Attributes:
        parameters: `page_size` is the number of tokens in a page. `reach_pages` is the number of pages before the end
            of a match that must have window pages.
        max_window_examples: number of random sequences of cache calls that `test_random_histories_with_windows` runs,
            for each combination of parameters and each length of a sequence.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"page_size": (1, 4), "reach_pages": (0, 1, 2, 5)}
    max_window_examples: ClassVar[int] = 25

    @abstractmethod
    def create(self, context: CacheContext) -> PrefixCache:
        """Return a new, empty cache. `context.window` is set."""

    def window_rig(self, windows: FakeWindows, page_size: int = 1) -> CacheRig:
        """Return a test rig with a new cache."""
        return CacheRig(lambda context: LentArrays(self.create(replace(context, window=windows))), page_size)

    def test_a_match_ends_where_its_window_is_whole(self, page_size: int) -> None:
        """A match can end only where the last `reach_pages` pages before its end have window pages.

        If there are fewer pages before its end, all of them must have window pages.
        """
        for held, reach_pages, usable in _MATCHES:
            windows = FakeWindows(reach_pages, {page for page, bit in enumerate(held) if bit == "1"})
            rig = self.window_rig(windows, page_size)
            key = rig.key(*range(1, 9))
            assert rig.insert(key).cached_pages == 8
            case = f"window pages {held}, reach_pages {reach_pages}"
            assert rig.cache.probe(key) == usable, case
            assert rig.matched(key) == list(range(usable)), case

    def test_walk_shows_what_has_window_pages(self, page_size: int) -> None:
        """`insert` asks the window view which new pages have a window page, and `walk` shows the answer."""
        rig = self.window_rig(FakeWindows(2, {1, 2, 5}), page_size)
        rig.insert(rig.key(*range(1, 7)))
        shown = {page: view.has_window for view in rig.cache.walk() for page in view.pages.tolist()}
        assert [page for page in sorted(shown) if shown[page]] == [1, 2, 5]

    def test_a_locked_window_stays(self, page_size: int, reach_pages: int) -> None:
        """`lock_window` protects the window pages before a handle; `lock` alone protects no window page."""
        rig = self.window_rig(FakeWindows(reach_pages), page_size)
        rig.insert(rig.key(1, 2, 3, 4, 5))
        handle = rig.hold(rig.key(1, 2, 3, 4, 5))
        rig.cache.lock_window(handle, 2)
        assert rig.cache.evictable_window_pages == 3
        evicted = rig.cache.evict_window(100)
        assert (as_list(evicted.pages), sorted(as_list(evicted.window_pages))) == ([], [0, 1, 2])
        rig.cache.unlock_window(handle, 2)
        assert rig.cache.evictable_window_pages == 2
        evicted = rig.cache.evict_window(100)
        assert (as_list(evicted.pages), sorted(as_list(evicted.window_pages))) == ([], [3, 4])
        assert rig.cached_pages() == [0, 1, 2, 3, 4]

    def test_offered_window_pages_are_taken_over(self, page_size: int) -> None:
        """A cached page without a window page takes the window page of the offered page, and `version` grows."""
        windows = FakeWindows(2, set())
        rig = self.window_rig(windows, page_size)
        rig.insert(rig.key(1, 2, 3, 4, 5, 6))
        version = rig.cache.version
        windows.held = {6, 7, 8, 9}
        result = rig.insert(rig.key(1, 2, 3, 4))
        assert (result.existing_pages, as_list(result.pages)) == (4, [0, 1, 2, 3])
        assert rig.cache.version > version
        assert rig.cache.probe(rig.key(1, 2, 3, 4, 5, 6)) == 4

    def test_lost_windows_shorten_matches(self, page_size: int) -> None:
        """Evicted window pages shorten later matches, and `version` grows."""
        rig = self.window_rig(FakeWindows(2), page_size)
        key = rig.key(1, 2, 3, 4)
        rig.insert(key)
        version = rig.cache.version
        rig.cache.evict_window(100)
        assert rig.cache.version > version
        assert rig.cache.probe(key) == rig.cache.evictable_window_pages == 0

    def test_random_histories_with_windows(self, page_size: int, reach_pages: int) -> None:
        """After each step of random histories, the cache agrees with a plain dictionary."""
        check_random_windows(lambda windows: self.window_rig(windows, page_size), reach_pages, self.max_window_examples)
