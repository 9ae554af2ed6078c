"""Random histories of a prefix cache, compared with a dictionary after every step."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from graftlm.contracts import NodeStats, PrefixHandle, PrefixKey, ProbePlace
from graftlm.testing.cache_rig import CacheRig, as_list, prompt

__all__ = ["PrefixCacheMachine", "check_random_histories"]

#: Letters and namespaces are few, so that prompts collide.
_LETTERS = st.lists(st.integers(0, 2), max_size=7)
_NAMESPACES = st.sampled_from(["", "tenant"])
_PICKS = st.integers(0, 2**16)
_NUM_PAGES = 64

#: Steps of histories, short ones first: what they show can be read as it is, without minutes of shrinking.
_HISTORY_LENS = (8, 40)

_Prefix = tuple[str, bytes]


def check_random_histories(make_rig: Callable[[], CacheRig], max_examples: int) -> None:
    """Run random histories on fresh caches.

    Raises:
        AssertionError: the cache disagreed with the dictionary; hypothesis prints the history.
    """

    class Machine(PrefixCacheMachine):
        def __init__(self) -> None:
            super().__init__(make_rig())

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
    """A request that holds a locked handle on a prefix of its key."""

    key: PrefixKey
    handle: PrefixHandle
    num_locks: int = 1


@dataclass(slots=True)
class _Dictionary:
    """What the cache should hold: the page of every cached prefix, by namespace and the bytes of its tokens."""

    page_size: int
    pages: dict[_Prefix, int] = field(default_factory=dict)

    def prefix(self, key: PrefixKey, num_pages: int) -> _Prefix:
        return key.namespace, key.token_ids[: num_pages * self.page_size].tobytes()

    def match(self, key: PrefixKey) -> list[int]:
        """Return the pages of the longest cached prefix."""
        found = []
        for num_pages in range(1, len(key.token_ids) // self.page_size + 1):
            page = self.pages.get(self.prefix(key, num_pages))
            if page is None:
                break
            found.append(page)
        return found

    def forget(self, gone: list[int]) -> None:
        self.pages = {prefix: page for prefix, page in self.pages.items() if page not in gone}


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests come, match, insert, lock, unlock and go, while the cache evicts and resets."""

    def __init__(self, rig: CacheRig) -> None:
        super().__init__()
        self.rig = rig
        self.cache = rig.cache
        self.page_size = rig.page_size
        self.model = _Dictionary(rig.page_size)
        self.free = list(range(_NUM_PAGES))
        self.requests: list[_Request] = []
        self.places: dict[_Prefix, ProbePlace | None] = {}
        self.inserted: set[_Prefix] = set()
        self.seen = (self.cache.version, frozenset(self.model.pages))

    # -- what happens

    @rule(letters=_LETTERS, tail=st.integers(0, 3), namespace=_NAMESPACES, priority=st.integers(0, 2))
    def begin(self, letters: list[int], tail: int, namespace: str, priority: int) -> None:
        """A request comes, matches and locks."""
        key = PrefixKey(prompt(self.page_size, *letters, tail=tail % self.page_size), namespace, priority)
        match = self.cache.match(key)
        expected = self.model.match(key)
        assert as_list(match.pages) == expected, "the match is not the longest cached prefix"
        assert match.handle.num_pages == len(expected), "the handle is not where the match ends"
        self.cache.lock(match.handle)
        self.requests.append(_Request(key, match.handle))

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS)
    def go_on(self, pick: int) -> None:
        """A request looks again, from where it was; others may have cached more of its prompt."""
        request = self._pick(pick)
        match = self.cache.match(request.key, request.handle)
        expected = self.model.match(request.key)
        assert as_list(match.pages) == expected[request.handle.num_pages :], "resuming found something else"
        assert match.handle.num_pages == len(expected), "the handle is not where the match ends"
        self._move(request, match.handle)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS, num_new_pages=st.integers(0, 7))
    def insert(self, pick: int, num_new_pages: int) -> None:
        """A request offers the next chunk of its prompt."""
        request = self._pick(pick)
        start = request.handle.num_pages
        end = min(start + num_new_pages, len(request.key.token_ids) // self.page_size)
        if end - start > len(self.free):
            return
        own = [self.free.pop() for _ in range(end - start)]
        key = PrefixKey(request.key.token_ids[: end * self.page_size].copy(), request.key.namespace)
        self.inserted.add((key.namespace, key.token_ids.tobytes()))
        held = self.model.match(key)
        result = self.cache.insert(key, np.array(own, dtype=np.int32), request.handle)
        assert result.existing_pages == len(held), "existing_pages is not what the cache held"
        assert result.existing_pages <= result.cached_pages <= end, "cached_pages is out of range"
        assert result.handle.num_pages == result.cached_pages, "the handle is not at cached_pages"
        taken = own[result.existing_pages - start : result.cached_pages - start]
        assert as_list(result.pages) == held[start:] + taken, "the cache's pages differ"
        self.free += [page for page in own if page not in taken]
        for num_pages, page in enumerate(taken, start=result.existing_pages + 1):
            self.model.pages[self.model.prefix(key, num_pages)] = page
        self._move(request, result.handle)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS)
    def lock_again(self, pick: int) -> None:
        """A request locks its handle once more."""
        request = self._pick(pick)
        self.cache.lock(request.handle)
        request.num_locks += 1

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS)
    def unlock_once(self, pick: int) -> None:
        """A request unlocks once; with its last lock it is gone."""
        request = self._pick(pick)
        self.cache.unlock(request.handle)
        request.num_locks -= 1
        if request.num_locks == 0:
            self.requests.remove(request)

    @rule(letters=_LETTERS, namespace=_NAMESPACES)
    def serve(self, letters: list[int], namespace: str) -> None:
        """A request comes, inserts its whole prompt and goes."""
        self.begin(letters, 0, namespace, 0)
        self.insert(len(self.requests) - 1, len(letters))
        self.unlock_once(len(self.requests) - 1)

    @rule(num_pages=st.integers(0, 3))
    def evict(self, num_pages: int) -> None:
        """Memory is short."""
        evictable = self.cache.evictable_pages
        order = _EvictionOrder(self.rig)
        self.rig.strategy.evicted.clear()
        gone = as_list(self.cache.evict(num_pages))
        assert len(gone) >= min(num_pages, evictable), "evict() gave less than it could"
        assert len(gone) == len(set(gone)), "evict() gave a page twice"
        order.check(self.rig.strategy.evicted)
        self._hand_back(gone)

    @precondition(lambda self: len(self.free) < _NUM_PAGES // 2)
    @rule()
    def reset(self) -> None:
        """Everything that is not locked is forgotten."""
        self._hand_back(as_list(self.cache.reset()))
        assert self.cache.evictable_pages == 0, "reset() left evictable pages"

    @rule(letters=_LETTERS, namespace=_NAMESPACES)
    def probe(self, letters: list[int], namespace: str) -> None:
        """A scheduler asks."""
        key = PrefixKey(prompt(self.page_size, *letters), namespace)
        before = self.rig.snapshot()
        assert self.cache.probe(key) == len(self.model.match(key)), "probe() disagrees with match()"
        assert self.rig.snapshot() == before, "probe() changed something"

    @rule(letters=_LETTERS, namespace=_NAMESPACES)
    def probe_again(self, letters: list[int], namespace: str) -> None:
        """A scheduler asks for what it asked before."""
        key = PrefixKey(prompt(self.page_size, *letters), namespace)
        prefix = self.model.prefix(key, len(letters))
        before = self.rig.snapshot()
        place = self.cache.probe_again(key, self.places.get(prefix))
        self.places[prefix] = place
        num_pages = 0 if place is None else place.num_pages
        assert num_pages == len(self.model.match(key)), "probe_again() disagrees with match()"
        assert self.rig.snapshot() == before, "probe_again() changed something"

    @rule(letters=_LETTERS, tail=st.integers(0, 3), namespace=_NAMESPACES, num_tokens=st.integers(0, 9))
    def continuation(self, letters: list[int], tail: int, namespace: str, num_tokens: int) -> None:
        """A drafter asks."""
        key = PrefixKey(prompt(self.page_size, *letters, tail=tail % self.page_size), namespace)
        before = self.rig.snapshot()
        found = self.cache.continuation(key, num_tokens)
        whole = key.token_ids.tobytes() + found.tobytes()
        assert len(found) <= num_tokens, "continuation() returned too many tokens"
        assert not len(found) or any(other == namespace and text.startswith(whole) for other, text in self.inserted), (
            "continuation() returned tokens that were not inserted after the key"
        )
        assert self.rig.snapshot() == before, "continuation() changed something"

    @invariant()
    def old_places_are_good_places(self) -> None:
        """Wherever a probe ended before, the next one from there finds what a match would."""
        for prefix, place in self.places.items():
            key = PrefixKey(np.frombuffer(prefix[1], np.int32), prefix[0])
            again = self.cache.probe_again(key, place)
            assert (0 if again is None else again.num_pages) == len(self.model.match(key)), "a place was misleading"

    @precondition(lambda self: len(self.requests) > 3)
    @rule()
    def all_leave(self) -> None:
        """Every request unlocks and goes; all pages come back."""
        for request in self.requests:
            for _ in range(request.num_locks):
                self.cache.unlock(request.handle)
        self.requests.clear()
        assert self.cache.locked_pages == 0, "locks do not balance"
        self._hand_back(as_list(self.cache.evict(_NUM_PAGES)))
        assert sorted(self.free) == list(range(_NUM_PAGES)), "pages were lost"

    # -- what holds at any time

    @invariant()
    def pages_are_conserved(self) -> None:
        """Every page is free or cached, once."""
        assert sorted(self.free + self.rig.cached_pages()) == list(range(_NUM_PAGES)), "a page is lost, or owned twice"

    @invariant()
    def the_tree_spells_the_dictionary(self) -> None:
        """`walk` shows each prefix with its page, and each node with its locks."""
        spelled: dict[_Prefix, int] = {}
        ends: dict[int, bytes] = {}
        for view in self.cache.walk():
            tokens = b"" if view.parent_id is None else ends[view.parent_id]
            assert view.stats.depth == len(tokens) // 4, "stats.depth is not the tokens in front of the node"
            assert view.stats.tokens == len(view.token_ids), "stats.tokens is not the node's tokens"
            for page, run in zip(view.pages.tolist(), view.token_ids.reshape(-1, self.page_size), strict=True):
                tokens += run.tobytes()
                spelled[view.namespace, tokens] = page
            ends[view.node_id] = tokens
            assert view.num_locks == self._num_locks((view.namespace, tokens)), (
                "num_locks is not the handles that hold it"
            )
        assert spelled == self.model.pages, "the tree and the dictionary differ"

    @invariant()
    def counters_are_right(self) -> None:
        """`locked_pages` and `evictable_pages` are what the locked handles say."""
        num_locked = sum(self._num_locks(prefix) > 0 for prefix in self.model.pages)
        assert self.cache.locked_pages == num_locked, "locked_pages is wrong"
        assert self.cache.evictable_pages == len(self.model.pages) - num_locked, "evictable_pages is wrong"

    @invariant()
    def the_version_tells_of_changes(self) -> None:
        """`version` grows when prefixes come or go."""
        version, prefixes = self.seen
        self.seen = (self.cache.version, frozenset(self.model.pages))
        assert self.cache.version >= version, "version went back"
        assert self.cache.version > version or self.seen[1] == prefixes, "the content changed, but not the version"

    @invariant()
    def the_strategy_knows_all_nodes(self) -> None:
        """Hooks and `walk` speak of the same nodes."""
        assert {view.stats for view in self.cache.walk()} == self.rig.strategy.live, "hooks and walk() differ"

    @invariant()
    def events_add_up(self) -> None:
        """Who listens holds the tree that `walk` shows."""
        self.rig.check_mirror()

    # -- helpers

    def _pick(self, pick: int) -> _Request:
        return self.requests[pick % len(self.requests)]

    def _move(self, request: _Request, handle: PrefixHandle) -> None:
        """Lock a request's new handle, then unlock its old one."""
        for _ in range(request.num_locks):
            self.cache.lock(handle)
        for _ in range(request.num_locks):
            self.cache.unlock(request.handle)
        request.handle = handle

    def _num_locks(self, prefix: _Prefix) -> int:
        """Return how many locks keep a prefix: those of handles on or below it."""
        namespace, tokens = prefix
        return sum(
            request.num_locks
            for request in self.requests
            if request.key.namespace == namespace
            and self.model.prefix(request.key, request.handle.num_pages)[1].startswith(tokens)
        )

    def _hand_back(self, gone: list[int]) -> None:
        locked = [page for prefix, page in self.model.pages.items() if self._num_locks(prefix)]
        assert not set(gone) & set(locked), "a locked page was given up"
        assert set(gone) <= set(self.model.pages.values()), "a page was given up that was not cached"
        self.model.forget(gone)
        self.free += gone


class _EvictionOrder:
    """The order in which a strategy wants leaves to go, from before the cache was asked."""

    def __init__(self, rig: CacheRig) -> None:
        views = list(rig.cache.walk())
        self._parent = {view.stats: view.parent_id for view in views}
        self._stats = {view.node_id: view.stats for view in views}
        self._num_children = {view.stats: 0 for view in views}
        for view in views:
            if view.parent_id is not None:
                self._num_children[self._stats[view.parent_id]] += 1
        self._unlocked = {view.stats for view in views if view.num_locks == 0}
        self._priority = {stats: rig.strategy.priority(stats) for stats in self._unlocked}

    def check(self, evicted: list[NodeStats]) -> None:
        """Expect each node to have been an unlocked leaf of the lowest priority when it went."""
        for stats in evicted:
            leaves = [other for other in self._unlocked if self._num_children[other] == 0]
            assert stats in leaves, "evict() took a node that was locked, or had children"
            lowest = min(self._priority[leaf] for leaf in leaves)
            assert self._priority[stats] == lowest, "evict() did not take the leaf of the lowest priority"
            self._unlocked.remove(stats)
            parent_id = self._parent[stats]
            if parent_id is not None:
                self._num_children[self._stats[parent_id]] -= 1
