"""The conformance kit for prefix caches of models with a recurrent state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import CacheContext, PrefixCache
from graftlm.testing.cache_rig import CacheRig, as_list
from graftlm.testing.cache_views import LentArrays
from graftlm.testing.conformance import Conformance
from graftlm.types import PageIds

__all__ = ["FakeStates", "StateCacheConformance"]

#: Cases with a prompt of eight pages: (pages with a stored state ("1"), length of the match in pages).
_MATCHES = [
    ("11111111", 8),
    ("00000001", 8),
    ("00010100", 6),
    ("10000000", 1),
    ("00000000", 0),
]


class FakeStates:
    """A `StateView` over a set of pages, which the test changes.

    Args:
        held: the pages with a stored state; None: all pages.
    """

    def __init__(self, held: set[int] | None = None) -> None:
        self._held = held
        self._version = 0

    @property
    def version(self) -> int:
        """Number of calls of `set`."""
        return self._version

    def set(self, held: set[int]) -> None:
        """Set the pages with a stored state."""
        self._held = held
        self._version += 1

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return whether each page has a stored state."""
        if self._held is None:
            return np.ones(len(pages), dtype=np.bool_)
        return np.isin(pages, list(self._held))


class StateCacheConformance(Conformance, ABC):
    """The kit for stored states, for caches with the capabilities `state` and `reuses`.

    `PrefixCacheConformance` checks the other parts of the contract `PrefixCache`.

        class TestMyCacheWithStates(StateCacheConformance):
            def create(self, context):
                return MyCache(context)

    Attributes:
        parameters: `page_size` is the number of tokens in a page.
    """

    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {"page_size": (1, 4)}

    @abstractmethod
    def create(self, context: CacheContext) -> PrefixCache:
        """Return a new, empty cache. `context.states` may be set."""

    def state_rig(self, states: FakeStates, page_size: int) -> CacheRig:
        """Return a test rig with a new cache."""
        return CacheRig(lambda context: LentArrays(self.create(replace(context, states=states))), page_size)

    def test_a_match_ends_at_the_deepest_state(self, page_size: int) -> None:
        """A match ends at the last cached page with a stored state; `found_pages` counts all cached pages."""
        for held, usable in _MATCHES:
            states = FakeStates({page for page, bit in enumerate(held) if bit == "1"})
            rig = self.state_rig(states, page_size)
            assert rig.insert(rig.key(*range(1, 9))).cached_pages == 8
            longer = rig.key(*range(1, 9), 30, 31)
            match = rig.cache.match(longer)
            assert as_list(match.pages) == list(range(usable)), f"states {held}"
            assert match.handle.num_pages == usable, f"states {held}"
            assert match.found_pages == 8, f"states {held}: {match.found_pages} pages were found"
            assert rig.cache.probe(longer) == usable, f"states {held}: probe() disagrees with match()"

    def test_splits_do_not_affect_states(self, page_size: int) -> None:
        """An identical prompt matches as far as before, however often its path was split."""
        states = FakeStates()
        rig = self.state_rig(states, page_size)
        key = rig.key(*range(1, 9))
        rig.insert(key)
        states.set({7})
        for cut in (6, 3, 1):
            rig.insert(rig.key(*range(1, cut + 1), 20 + cut))
            assert rig.matched(key) == list(range(8))

    def test_a_resumed_match_needs_a_state_only_at_its_end(self, page_size: int) -> None:
        """A match from a handle is empty, or ends at a stored state after this handle."""
        states = FakeStates()
        rig = self.state_rig(states, page_size)
        key = rig.key(*range(1, 9))
        rig.insert(key)
        handle = rig.hold(rig.key(1, 2, 3))
        states.set({0, 5})
        assert rig.matched(key, handle) == [3, 4, 5]
        states.set({0})
        match = rig.cache.match(key, handle)
        assert (as_list(match.pages), match.handle.num_pages, match.found_pages) == ([], 3, 8)

    def test_inserts_do_not_depend_on_states(self, page_size: int) -> None:
        """`insert` recognises cached pages without states, and returns them."""
        rig = self.state_rig(FakeStates(set()), page_size)
        rig.insert(rig.key(1, 2, 3))
        start = rig.cache.match(rig.key(1, 2, 3, 4)).handle
        result = rig.cache.insert(rig.key(1, 2, 3, 4), rig.new_pages(4), start)
        assert (result.existing_pages, as_list(result.pages)) == (3, [0, 1, 2, 6])

    def test_the_version_grows_with_the_states(self, page_size: int) -> None:
        """If the states change, `version` grows, and `probe_again` from an earlier place agrees with `match`."""
        states = FakeStates({1, 3})
        rig = self.state_rig(states, page_size)
        key = rig.key(1, 2, 3, 4)
        rig.insert(key)
        place, version = rig.cache.probe_again(key, None), rig.cache.version
        assert place is not None, "probe_again() found nothing"
        for held, usable in (({1}, 2), (set(), 0), ({2}, 3)):
            states.set(held)
            assert rig.cache.version > version, "the states changed, but version did not"
            version, place = rig.cache.version, rig.cache.probe_again(key, place)
            assert (0 if place is None else place.num_pages) == usable

    def test_walk_counts_states(self, page_size: int) -> None:
        """`walk` shows for each node at how many of its pages' ends a state is stored."""
        rig = self.state_rig(FakeStates({0, 2, 3}), page_size)
        rig.insert(rig.key(1, 2, 3, 4, 5))
        assert sum(view.num_states for view in rig.cache.walk()) == 3
