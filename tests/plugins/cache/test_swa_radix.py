from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from graftlm.contracts import CacheContext, PrefixCache, PrefixHandle, PrefixKey
from graftlm.errors import InvariantError
from graftlm.testing import CacheRig, PrefixCacheConformance
from graftlm.testing.cache_rig import as_list, prompt
from graftlm_cache.swa_radix import SWARadixCache


@dataclass
class Windows:
    """A view in which the test says what has a window page; None: everything has."""

    reach_pages: int
    held: set[int] | None = None

    def holds(self, pages):
        return np.array([self.held is None or page in self.held for page in pages.tolist()], dtype=np.bool_)


def with_window(context: CacheContext, windows: Windows) -> SWARadixCache:
    return SWARadixCache(replace(context, window=windows), windows)


def make_rig(reach_pages: int, page_size: int = 1) -> CacheRig:
    return CacheRig(lambda context: with_window(context, Windows(reach_pages)), page_size)


class TestSWARadixCacheWithEveryWindowPage(PrefixCacheConformance):
    reach_pages: ClassVar[int] = 3

    def create(self, context: CacheContext) -> PrefixCache:
        return with_window(context, Windows(self.reach_pages))


class TestSWARadixCacheWithoutReach(PrefixCacheConformance):
    parameters: ClassVar = {"page_size": (1, 4)}

    def create(self, context: CacheContext) -> PrefixCache:
        return with_window(context, Windows(reach_pages=0, held=set()))


# -- where a match may end


@pytest.mark.parametrize(
    ("held", "reach_pages", "usable"),
    [
        ("11111111", 3, 8),
        ("00000111", 3, 8),
        ("00000011", 3, 0),
        ("00111011", 3, 5),
        ("01110000", 3, 4),
        ("11000000", 3, 2),
        ("11000000", 0, 8),
        ("00000000", 1, 0),
        ("10000001", 1, 8),
    ],
)
def test_a_match_ends_where_a_window_is_whole(held, reach_pages, usable):
    windows = Windows(reach_pages, {page for page, bit in enumerate(held) if bit == "1"})
    rig = CacheRig(lambda context: with_window(context, windows), 1)
    key = rig.key(*range(1, 9))
    result = rig.insert(key)
    assert result.cached_pages == 8
    assert rig.cache.probe(key) == usable
    assert rig.matched(key) == list(range(usable))
    shown = {page: view.has_window for view in rig.cache.walk() for page in view.pages.tolist()}
    assert "".join(str(int(shown[page])) for page in range(8)) == held


def test_a_longer_run_gives_up_what_lies_in_front_of_its_last_window():
    rig = make_rig(reach_pages=3)
    key = rig.key(*range(1, 11))
    rig.insert(key)
    gone = rig.cache.evict_window(1)
    assert (as_list(gone.pages), as_list(gone.window_pages)) == ([], list(range(7)))
    assert rig.cache.probe(key) == 10
    assert rig.cache.probe(rig.key(*range(1, 10))) == 0
    assert rig.cache.evictable_window_pages == 3


def test_a_leaf_without_its_window_leaves_with_all_that_no_match_can_end_in():
    rig = make_rig(reach_pages=3)
    rig.insert(rig.key(*range(1, 11)))
    rig.cache.evict_window(1)
    gone = rig.cache.evict_window(1)
    assert (sorted(as_list(gone.pages)), as_list(gone.window_pages)) == (list(range(10)), [])
    assert rig.cached_pages() == []
    rig.check_mirror()


def test_eviction_takes_what_it_leaves_bare():
    rig = make_rig(reach_pages=3)
    rig.insert(rig.key(*range(1, 11)))
    rig.cache.evict_window(1)
    assert sorted(as_list(rig.cache.evict(1))) == list(range(10))


def test_a_branch_keeps_the_bare_run_it_stands_on():
    rig = make_rig(reach_pages=2)
    rig.insert(rig.key(1, 2, 3, 4, 5, 6))
    rig.insert(rig.key(1, 2, 3, 4, 8, 9))
    for _ in range(2):
        rig.cache.evict_window(2)  # the trunk's front, then its last window
    assert rig.cache.probe(rig.key(1, 2, 3, 4)) == 0
    assert rig.cache.probe(rig.key(1, 2, 3, 4, 5, 6)) == rig.cache.probe(rig.key(1, 2, 3, 4, 8, 9)) == 6


def test_the_window_that_was_used_last_goes_last():
    rig = make_rig(reach_pages=1)
    for letter in (1, 2, 3):
        rig.insert(rig.key(letter))
    handle = rig.hold(rig.key(1))
    rig.cache.lock_window(handle, 1)
    rig.cache.unlock_window(handle, 1)
    rig.cache.unlock(handle)
    assert [as_list(rig.cache.evict_window(1).pages) for _ in range(3)] == [[1], [2], [0]]


def test_a_locked_window_stays_and_only_it():
    rig = make_rig(reach_pages=2)
    rig.insert(rig.key(1, 2, 3, 4, 5))
    handle = rig.hold(rig.key(1, 2, 3, 4, 5))
    rig.cache.lock_window(handle, 2)
    assert rig.cache.evictable_window_pages == 3
    gone = rig.cache.evict_window(100)
    assert (as_list(gone.pages), sorted(as_list(gone.window_pages))) == ([], [0, 1, 2])
    rig.cache.unlock_window(handle, 2)
    gone = rig.cache.evict_window(100)
    assert (as_list(gone.pages), sorted(as_list(gone.window_pages))) == ([], [3, 4])  # the path is still locked
    assert rig.cached_pages() == [0, 1, 2, 3, 4]


def test_one_window_unlock_too_many_is_an_error():
    rig = make_rig(reach_pages=2)
    rig.insert(rig.key(1, 2, 3))
    handle = rig.hold(rig.key(1, 2, 3))
    with pytest.raises(InvariantError, match="nobody holds it"):
        rig.cache.unlock_window(handle, 2)


def test_a_pinned_prefix_keeps_its_last_window_longest():
    rig = make_rig(reach_pages=1)
    rig.insert(rig.key(1, 2))
    rig.cache.pin(rig.key(1, 2), 1000.0)
    rig.insert(rig.key(3))
    assert as_list(rig.cache.evict_window(1).window_pages) == [0]
    assert as_list(rig.cache.evict_window(1).pages) == [2]
    assert rig.cache.probe(rig.key(1, 2)) == 2
    assert as_list(rig.cache.evict_window(1).pages) == [1, 0]


def test_offered_window_pages_are_taken_over():
    windows = Windows(2, set())
    rig = CacheRig(lambda context: with_window(context, windows), 1)
    rig.insert(rig.key(1, 2, 3, 4, 5, 6))
    version = rig.cache.version
    windows.held = {6, 7, 8, 9}  # a request computes (1, 2, 3, 4) again
    key = rig.key(1, 2, 3, 4)
    result = rig.insert(key)
    assert (result.existing_pages, as_list(result.pages)) == (4, [0, 1, 2, 3])
    assert rig.cache.version > version
    assert rig.cache.probe(rig.key(1, 2, 3, 4, 5, 6)) == 4


# -- random histories

_LETTERS = st.lists(st.integers(0, 2), max_size=9)
_PICKS = st.integers(0, 2**16)
_NUM_PAGES = 64


@dataclass(eq=False)
class _Request:
    tokens: tuple[int, ...]
    handle: PrefixHandle
    window: int = field(default=0)  # pages before the handle whose windows it locks


class SWAMachine(RuleBasedStateMachine):
    """Requests come and go, with any window pages; a dictionary knows what the cache should hold."""

    reach_pages = 2
    page_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.windows = Windows(self.reach_pages, set())
        self.rig = CacheRig(lambda context: with_window(context, self.windows), self.page_size)
        self.cache = self.rig.cache
        self.pages: dict[tuple[int, ...], int] = {}  # prefix -> page
        self.free = list(range(_NUM_PAGES))
        self.requests: list[_Request] = []

    # -- the model

    def key(self, tokens):
        return PrefixKey(prompt(self.page_size, *tokens))

    def covered(self, prefix):
        return prefix in self.pages and self.pages[prefix] in self.windows.held

    def usable(self, tokens, resumed=0):
        """Return the longest prefix in the cache that has a whole window, or `resumed`."""
        best = resumed
        for end in range(1, len(tokens) + 1):
            if tokens[:end] not in self.pages:
                break
            if all(self.covered(tokens[:i]) for i in range(max(end - self.reach_pages, 0) + 1, end + 1)):
                best = max(best, end)
        return best

    def is_locked(self, prefix):
        return any(r.tokens[: r.handle.num_pages][: len(prefix)] == prefix for r in self.requests)

    def is_window_locked(self, prefix):
        return any(
            r.tokens[: len(prefix)] == prefix and r.handle.num_pages - r.window < len(prefix) <= r.handle.num_pages
            for r in self.requests
        )

    def forget(self, gone):
        assert len(gone) == len(set(gone)), "a page was given up twice"
        for prefix, page in list(self.pages.items()):
            if page in gone:
                assert not self.is_locked(prefix), "a locked page was given up"
                del self.pages[prefix]
        self.free += gone
        self.windows.held -= set(gone)

    def move(self, request, handle, window):
        window = min(window, handle.num_pages)
        self.cache.lock(handle)
        self.cache.lock_window(handle, window)
        self.cache.unlock_window(request.handle, request.window)
        self.cache.unlock(request.handle)
        request.handle, request.window = handle, window

    # -- what happens

    @rule(letters=_LETTERS, window=st.integers(0, 4))
    def begin(self, letters, window):
        tokens = tuple(letters)
        match = self.cache.match(self.key(tokens))
        expected = self.usable(tokens)
        assert as_list(match.pages) == [self.pages[tokens[:end]] for end in range(1, expected + 1)]
        window = min(window, expected)
        self.cache.lock(match.handle)
        self.cache.lock_window(match.handle, window)
        self.requests.append(_Request(tokens, match.handle, window))

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS, window=st.integers(0, 4))
    def go_on(self, pick, window):
        request = self.requests[pick % len(self.requests)]
        before = request.handle.num_pages
        match = self.cache.match(self.key(request.tokens), request.handle)
        assert match.handle.num_pages == self.usable(request.tokens, before)
        self.move(request, match.handle, window)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS, offered=st.lists(st.booleans(), max_size=9), window=st.integers(0, 4))
    def insert(self, pick, offered, window):
        request = self.requests[pick % len(self.requests)]
        start = request.handle.num_pages
        offered = offered[: min(len(request.tokens) - start, len(self.free))]
        own = [self.free.pop() for _ in offered]
        self.windows.held |= {page for page, has in zip(own, offered, strict=True) if has}
        tokens = request.tokens[: start + len(own)]
        result = self.cache.insert(self.key(tokens), np.array(own, dtype=np.int32), request.handle)
        assert (result.cached_pages, result.handle.num_pages) == (len(tokens), len(tokens))
        for end, (page, has) in enumerate(zip(own, offered, strict=True), start=start + 1):
            held = self.pages.setdefault(tokens[:end], page)
            assert result.pages[end - start - 1] == held
            if held != page:  # the caller moves the window page, and frees its duplicate
                self.windows.held |= {held} if has else set()
                self.windows.held -= {page}
                self.free.append(page)
        self.move(request, result.handle, window)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS)
    def leave(self, pick):
        request = self.requests.pop(pick % len(self.requests))
        self.cache.unlock_window(request.handle, request.window)
        self.cache.unlock(request.handle)

    @rule(letters=_LETTERS, num_held=st.integers(0, 9))
    def serve(self, letters, num_held):
        """A request comes, computes all, keeps the windows of its last pages, and goes."""
        self.begin(letters, 0)
        num_new = len(letters) - self.requests[-1].handle.num_pages
        self.insert(len(self.requests) - 1, [i >= num_new - num_held for i in range(num_new)], 0)
        self.leave(len(self.requests) - 1)

    @rule(num_pages=st.integers(0, 4))
    def evict(self, num_pages):
        evictable = self.cache.evictable_pages
        gone = as_list(self.cache.evict(num_pages))
        assert len(gone) >= min(num_pages, evictable)
        self.forget(gone)

    @rule(num_pages=st.integers(0, 6))
    def evict_window(self, num_pages):
        evictable = self.cache.evictable_window_pages
        locked = {page for prefix, page in self.pages.items() if self.is_window_locked(prefix)} & self.windows.held
        before = len(self.windows.held)
        result = self.cache.evict_window(num_pages)
        stripped = as_list(result.window_pages)
        assert set(stripped) <= self.windows.held, "a window page was given up that is not there"
        assert not locked & set(stripped), "a locked window was given up"
        self.windows.held -= set(stripped)
        self.forget(as_list(result.pages))
        assert before - len(self.windows.held) >= min(num_pages, evictable)

    @precondition(lambda self: len(self.free) < _NUM_PAGES // 2)
    @rule()
    def reset(self):
        self.forget(as_list(self.cache.reset()))
        assert self.cache.evictable_pages == 0

    @rule(letters=_LETTERS)
    def probe(self, letters):
        before = self.rig.snapshot()
        assert self.cache.probe(self.key(letters)) == self.usable(tuple(letters))
        assert self.rig.snapshot() == before

    # -- what holds at any time

    @invariant()
    def pages_of_both_memories_are_conserved(self):
        assert sorted([*self.free, *self.pages.values()]) == list(range(_NUM_PAGES))
        assert self.windows.held <= set(self.pages.values())
        assert self.rig.cached_pages() == sorted(self.pages.values())

    @invariant()
    def the_tree_shows_what_has_window_pages(self):
        for view in self.cache.walk():
            held = self.windows.holds(view.pages)
            assert (held == view.has_window).all()

    @invariant()
    def the_counts_are_right(self):
        locked = [prefix for prefix in self.pages if self.is_locked(prefix)]
        assert (self.cache.locked_pages, self.cache.evictable_pages) == (len(locked), len(self.pages) - len(locked))
        free_windows = [p for p in self.pages if self.covered(p) and not self.is_window_locked(p)]
        assert self.cache.evictable_window_pages == len(free_windows)

    @invariant()
    def events_add_up(self):
        self.rig.check_mirror()


@pytest.mark.parametrize("reach_pages", [0, 1, 2, 5])
def test_random_histories(reach_pages):
    class Machine(SWAMachine):
        pass

    Machine.reach_pages = reach_pages
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
