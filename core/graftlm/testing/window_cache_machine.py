"""Runs random histories of a prefix cache with window pages, and compares it with a dictionary after every step."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from numpy.typing import NDArray

from graftlm.contracts import PrefixHandle, PrefixKey, ProbePlace
from graftlm.testing.cache_rig import CacheRig, as_list, prompt
from graftlm.types import PageIds

__all__ = ["FakeWindows", "WindowCacheMachine", "check_random_windows"]

_LETTERS = st.lists(st.integers(0, 2), max_size=9)
_PICKS = st.integers(0, 2**16)
_LENGTHS = st.integers(0, 4)
_NUM_PAGES = 64

#: Numbers of steps in a history. Short histories run first: their failures are readable without shrinking, and
#: shrinking a long history can take minutes.
_HISTORY_LENS = (8, 40)

_Prefix = tuple[int, ...]


class FakeWindows:
    """A `WindowView` for which a test defines the pages that have window pages.

    Attributes:
        held: ids of the pages that have a window page; None: all pages.
    """

    def __init__(self, reach_pages: int, held: set[int] | None = None) -> None:
        self.held = held
        self._reach_pages = reach_pages

    @property
    def reach_pages(self) -> int:
        """Number of pages before the end of a match that must have a window page."""
        return self._reach_pages

    def holds(self, pages: PageIds) -> NDArray[np.bool_]:
        """Return whether each page has a window page, bool [len(pages)]."""
        return np.array([self.held is None or page in self.held for page in pages.tolist()], dtype=np.bool_)


def check_random_windows(make_rig: Callable[[FakeWindows], CacheRig], reach_pages: int, max_examples: int) -> None:
    """Run random histories, each on a new cache.

    Args:
        make_rig: function from a window view to a rig with a new cache.
        reach_pages: number of pages before the end of a match that must have a window page.
        max_examples: number of histories of each length.

    Raises:
        AssertionError: the cache and the dictionary differ. `hypothesis` prints the history.
    """

    class Machine(WindowCacheMachine):
        def __init__(self) -> None:
            windows = FakeWindows(reach_pages, set())
            super().__init__(make_rig(windows), windows)

    for num_steps in _HISTORY_LENS:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=num_steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
                phases=(Phase.generate,),
                report_multiple_bugs=False,
            ),
        )


@dataclass(slots=True, eq=False)
class _Request:
    """A request with a locked handle, and with locked window pages for the `window_len` pages before the handle."""

    tokens: _Prefix
    handle: PrefixHandle
    window_len: int


class WindowCacheMachine(RuleBasedStateMachine):
    """A state machine: random requests insert pages with and without window pages; the cache evicts both kinds."""

    def __init__(self, rig: CacheRig, windows: FakeWindows) -> None:
        super().__init__()
        self.rig = rig
        self.cache = rig.cache
        self.windows = windows
        self.held: set[int] = set()
        self.pages: dict[_Prefix, int] = {}
        self.free = list(range(_NUM_PAGES))
        self.requests: list[_Request] = []
        self.places: dict[_Prefix, ProbePlace | None] = {}
        windows.held = self.held

    # -- rules (possible steps)

    @rule(letters=_LETTERS, window_len=_LENGTHS)
    def begin(self, letters: list[int], window_len: int) -> None:
        """A request begins: it matches its key, and locks the handle and some window pages."""
        tokens = tuple(letters)
        match = self.cache.match(self._key(tokens))
        expected = self._usable(tokens)
        assert as_list(match.pages) == [self.pages[tokens[:end]] for end in range(1, expected + 1)], (
            "the match is not the longest prefix with a whole window"
        )
        window_len = min(window_len, expected)
        self.cache.lock(match.handle)
        self.cache.lock_window(match.handle, window_len)
        self.requests.append(_Request(tokens, match.handle, window_len))

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS, window_len=_LENGTHS)
    def go_on(self, pick: int, window_len: int) -> None:
        """A request matches again from its handle."""
        request = self.requests[pick % len(self.requests)]
        expected = self._usable(request.tokens, request.handle.num_pages)
        match = self.cache.match(self._key(request.tokens), request.handle)
        assert match.handle.num_pages == expected, "a resumed match found other pages"
        self._move(request, match.handle, window_len)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS, offered=st.lists(st.booleans(), max_size=9), window_len=_LENGTHS)
    def insert(self, pick: int, offered: list[bool], window_len: int) -> None:
        """A request inserts pages with or without window pages; cached pages take the window pages of duplicates."""
        request = self.requests[pick % len(self.requests)]
        start = request.handle.num_pages
        offered = offered[: min(len(request.tokens) - start, len(self.free))]
        own = [self.free.pop() for _ in offered]
        self.held.update(page for page, has in zip(own, offered, strict=True) if has)
        tokens = request.tokens[: start + len(own)]
        result = self.cache.insert(self._key(tokens), np.array(own, dtype=np.int32), request.handle)
        assert result.cached_pages == result.handle.num_pages == len(tokens), "the cache did not take everything"
        for end, (page, has) in enumerate(zip(own, offered, strict=True), start=start + 1):
            cached = self.pages.setdefault(tokens[:end], page)
            assert int(result.pages[end - start - 1]) == cached, "insert() returned a wrong page"
            if cached != page:
                self.held.discard(page)
                self.held.update([cached] if has else [])
                self.free.append(page)
        self._move(request, result.handle, window_len)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS)
    def leave(self, pick: int) -> None:
        """A request unlocks its window pages and its handle, and ends."""
        request = self.requests.pop(pick % len(self.requests))
        self.cache.unlock_window(request.handle, request.window_len)
        self.cache.unlock(request.handle)

    @rule(letters=_LETTERS, num_held=st.integers(0, 9))
    def serve(self, letters: list[int], num_held: int) -> None:
        """A request begins, inserts its whole prompt with window pages for the last pages only, and ends."""
        self.begin(letters, 0)
        num_new = len(letters) - self.requests[-1].handle.num_pages
        self.insert(len(self.requests) - 1, [i >= num_new - num_held for i in range(num_new)], 0)
        self.leave(len(self.requests) - 1)

    @rule(num_pages=st.integers(0, 4))
    def evict(self, num_pages: int) -> None:
        """The cache evicts some pages."""
        evictable = self.cache.evictable_pages
        gone = as_list(self.cache.evict(num_pages))
        assert len(gone) >= min(num_pages, evictable), "evict() returned too few pages"
        self._forget(gone)

    @rule(num_pages=st.integers(0, 6))
    def evict_window(self, num_pages: int) -> None:
        """The cache evicts some window pages."""
        evictable, num_held = self.cache.evictable_window_pages, len(self.held)
        locked = {page for prefix, page in self.pages.items() if self._is_window_locked(prefix)}
        evicted = self.cache.evict_window(num_pages)
        without_window = set(as_list(evicted.window_pages))
        assert without_window <= self.held, "evict_window() returned a page that has no window page"
        assert not locked & without_window, "evict_window() returned a locked window page"
        self.held -= without_window
        self._forget(as_list(evicted.pages))
        assert num_held - len(self.held) >= min(num_pages, evictable), "evict_window() returned too few pages"

    @precondition(lambda self: len(self.free) < _NUM_PAGES // 2)
    @rule()
    def reset(self) -> None:
        """The cache evicts everything that is not locked."""
        self._forget(as_list(self.cache.reset()))
        assert self.cache.evictable_pages == 0, "reset() left evictable pages"

    @rule(letters=_LETTERS)
    def probe(self, letters: list[int]) -> None:
        """A caller probes a key."""
        before = self.rig.snapshot()
        usable = self._usable(tuple(letters))
        assert self.cache.probe(self._key(tuple(letters))) == usable, "probe() disagrees with match()"
        assert self.rig.snapshot() == before, "probe() changed something"

    @rule(letters=_LETTERS)
    def probe_again(self, letters: list[int]) -> None:
        """A caller probes a key from the place where its last probe of this key ended."""
        tokens = tuple(letters)
        self.places[tokens] = place = self.cache.probe_again(self._key(tokens), self.places.get(tokens))
        num_pages = 0 if place is None else place.num_pages
        assert num_pages == self._usable(tokens), "probe_again() disagrees with match()"

    # -- invariants (checked after each step)

    @invariant()
    def both_kinds_of_pages_are_conserved(self) -> None:
        """Every page is either free or cached, no page is cached twice, and every page with a window page is cached."""
        assert sorted([*self.free, *self.pages.values()]) == list(range(_NUM_PAGES)), "a page is lost, or owned twice"
        assert self.rig.cached_pages() == sorted(self.pages.values()), "walk() yields other pages"
        assert self.held <= set(self.pages.values()), "a page was evicted, but not its window page"

    @invariant()
    def the_tree_shows_what_has_window_pages(self) -> None:
        """All pages of a node have window pages, or none has one; `has_window` is correct."""
        for view in self.cache.walk():
            assert (self.windows.holds(view.pages) == view.has_window).all(), "has_window is wrong"

    @invariant()
    def counters_are_right(self) -> None:
        """The cache's three page counts agree with the locked handles and window pages."""
        num_locked = sum(self._is_locked(prefix) for prefix in self.pages)
        assert self.cache.locked_pages == num_locked, "locked_pages is wrong"
        assert self.cache.evictable_pages == len(self.pages) - num_locked, "evictable_pages is wrong"
        idle = [p for p, page in self.pages.items() if page in self.held and not self._is_window_locked(p)]
        assert self.cache.evictable_window_pages == len(idle), "evictable_window_pages is wrong"

    @invariant()
    def events_agree_with_the_tree(self) -> None:
        """A replay of the events gives the tree that `walk` yields."""
        self.rig.check_mirror()

    @invariant()
    def probes_from_old_places_are_correct(self) -> None:
        """A probe from any earlier place finds as many pages as `match`."""
        for tokens, place in self.places.items():
            again = self.cache.probe_again(self._key(tokens), place)
            assert (0 if again is None else again.num_pages) == self._usable(tokens), (
                "probe_again() from an earlier place disagrees with match()"
            )

    # -- helpers

    def _key(self, tokens: _Prefix) -> PrefixKey:
        return PrefixKey(prompt(self.rig.page_size, *tokens))

    def _usable(self, tokens: _Prefix, resumed: int = 0) -> int:
        """Return the number of pages of the longest cached prefix with a whole window; at least `resumed`."""
        usable = resumed
        for end in range(1, len(tokens) + 1):
            if tokens[:end] not in self.pages:
                break
            window = range(max(end - self.windows.reach_pages, 0) + 1, end + 1)
            if all(self.pages[tokens[:seen]] in self.held for seen in window):
                usable = max(usable, end)
        return usable

    def _is_locked(self, prefix: _Prefix) -> bool:
        return any(r.tokens[: r.handle.num_pages][: len(prefix)] == prefix for r in self.requests)

    def _is_window_locked(self, prefix: _Prefix) -> bool:
        return any(
            r.tokens[: len(prefix)] == prefix and r.handle.num_pages - r.window_len < len(prefix) <= r.handle.num_pages
            for r in self.requests
        )

    def _forget(self, gone: list[int]) -> None:
        assert len(gone) == len(set(gone)), "a page was evicted twice"
        for prefix in [prefix for prefix, page in self.pages.items() if page in gone]:
            assert not self._is_locked(prefix), "a locked page was evicted"
            del self.pages[prefix]
        self.free += gone
        self.held -= set(gone)

    def _move(self, request: _Request, handle: PrefixHandle, window_len: int) -> None:
        """Lock a request's new handle and window, then unlock its old ones."""
        window_len = min(window_len, handle.num_pages)
        self.cache.lock(handle)
        self.cache.lock_window(handle, window_len)
        self.cache.unlock_window(request.handle, request.window_len)
        self.cache.unlock(request.handle)
        request.handle, request.window_len = handle, window_len
