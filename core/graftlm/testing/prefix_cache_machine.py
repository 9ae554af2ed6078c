"""Runs random histories of a prefix cache, and compares it with a dictionary after every step."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from graftlm.contracts import NodeStats, PrefixHandle, PrefixKey, ProbePlace
from graftlm.testing.cache_rig import CacheRig, as_list, prompt

__all__ = ["PrefixCacheMachine", "check_random_histories"]

#: Few letters and namespaces, so that many prompts have common prefixes.
_LETTERS = st.lists(st.integers(0, 2), max_size=7)
_NAMESPACES = st.sampled_from(["", "tenant"])
_PICKS = st.integers(0, 2**16)
_NUM_PAGES = 64

#: Numbers of steps in a history. Short histories run first: their failures are readable without shrinking, and
#: shrinking a long history can take minutes.
_HISTORY_LENS = (8, 40)

_Prefix = tuple[str, bytes]


def check_random_histories(make_rig: Callable[[], CacheRig], max_examples: int) -> None:
    """Run random histories, which are sequences of cache calls, each on a new cache.

    Args:
        make_rig: function that returns a rig with a new cache.
        max_examples: number of histories of each length in steps.

    Raises:
        AssertionError: the cache and the dictionary differ. `hypothesis` prints the history.
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
    """A request with a locked handle at the end of a cached prefix of its key."""

    key: PrefixKey
    handle: PrefixHandle
    num_locks: int = 1


@dataclass(slots=True)
class _Dictionary:
    """The expected contents of the cache: (namespace, bytes of a prefix's tokens) -> last page of the prefix."""

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
    """A state machine: random requests match, insert, lock and unlock, while the cache evicts and is reset."""

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

    # -- rules (possible steps)

    @rule(letters=_LETTERS, tail=st.integers(0, 3), namespace=_NAMESPACES, priority=st.integers(0, 2))
    def begin(self, letters: list[int], tail: int, namespace: str, priority: int) -> None:
        """A request begins: it matches its key and locks the handle."""
        key = PrefixKey(prompt(self.page_size, *letters, tail=tail % self.page_size), namespace, priority)
        match = self.cache.match(key)
        expected = self.model.match(key)
        assert as_list(match.pages) == expected, "the match is not the longest cached prefix"
        assert match.handle.num_pages == len(expected), "the handle is not at the end of the match"
        self.cache.lock(match.handle)
        self.requests.append(_Request(key, match.handle))

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS)
    def go_on(self, pick: int) -> None:
        """A request matches again from its handle, because other requests may have cached more of its prompt."""
        request = self._pick(pick)
        match = self.cache.match(request.key, request.handle)
        expected = self.model.match(request.key)
        assert as_list(match.pages) == expected[request.handle.num_pages :], "a resumed match found other pages"
        assert match.handle.num_pages == len(expected), "the handle is not at the end of the match"
        self._move(request, match.handle)

    @precondition(lambda self: self.requests)
    @rule(pick=_PICKS, num_new_pages=st.integers(0, 7))
    def insert(self, pick: int, num_new_pages: int) -> None:
        """A request inserts the next chunk of its prompt."""
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
        assert result.existing_pages == len(held), "existing_pages is not the number of pages that were cached"
        assert result.existing_pages <= result.cached_pages <= end, "cached_pages is out of range"
        assert result.handle.num_pages == result.cached_pages, "the handle is not at cached_pages"
        taken = own[result.existing_pages - start : result.cached_pages - start]
        assert as_list(result.pages) == held[start:] + taken, "insert() returned wrong pages"
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
        """A request unlocks its handle once; without a lock, it ends."""
        request = self._pick(pick)
        self.cache.unlock(request.handle)
        request.num_locks -= 1
        if request.num_locks == 0:
            self.requests.remove(request)

    @rule(letters=_LETTERS, namespace=_NAMESPACES)
    def serve(self, letters: list[int], namespace: str) -> None:
        """A request begins, inserts its whole prompt and ends."""
        self.begin(letters, 0, namespace, 0)
        self.insert(len(self.requests) - 1, len(letters))
        self.unlock_once(len(self.requests) - 1)

    @rule(num_pages=st.integers(0, 3))
    def evict(self, num_pages: int) -> None:
        """The cache evicts some pages."""
        evictable = self.cache.evictable_pages
        order = _EvictionOrder(self.rig)
        self.rig.strategy.evicted.clear()
        gone = as_list(self.cache.evict(num_pages))
        assert len(gone) >= min(num_pages, evictable), "evict() returned too few pages"
        assert len(gone) == len(set(gone)), "evict() returned a page twice"
        order.check(self.rig.strategy.evicted)
        self._hand_back(gone)

    @precondition(lambda self: len(self.free) < _NUM_PAGES // 2)
    @rule()
    def reset(self) -> None:
        """The cache evicts everything that is not locked."""
        self._hand_back(as_list(self.cache.reset()))
        assert self.cache.evictable_pages == 0, "reset() left evictable pages"

    @rule(letters=_LETTERS, namespace=_NAMESPACES)
    def probe(self, letters: list[int], namespace: str) -> None:
        """A caller probes a key."""
        key = PrefixKey(prompt(self.page_size, *letters), namespace)
        before = self.rig.snapshot()
        assert self.cache.probe(key) == len(self.model.match(key)), "probe() disagrees with match()"
        assert self.rig.snapshot() == before, "probe() changed something"

    @rule(letters=_LETTERS, namespace=_NAMESPACES)
    def probe_again(self, letters: list[int], namespace: str) -> None:
        """A caller probes a key from the place where its last probe of this key ended."""
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
        """A drafter requests a continuation of a key."""
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
    def probes_from_old_places_are_correct(self) -> None:
        """A probe from any earlier place finds as many pages as `match`."""
        for prefix, place in self.places.items():
            key = PrefixKey(np.frombuffer(prefix[1], np.int32), prefix[0])
            again = self.cache.probe_again(key, place)
            assert (0 if again is None else again.num_pages) == len(self.model.match(key)), (
                "probe_again() from an earlier place disagrees with match()"
            )

    @precondition(lambda self: len(self.requests) > 3)
    @rule()
    def all_leave(self) -> None:
        """Every request unlocks its handle and ends; then the cache evicts all pages."""
        for request in self.requests:
            for _ in range(request.num_locks):
                self.cache.unlock(request.handle)
        self.requests.clear()
        assert self.cache.locked_pages == 0, "locks do not balance"
        self._hand_back(as_list(self.cache.evict(_NUM_PAGES)))
        assert sorted(self.free) == list(range(_NUM_PAGES)), "pages were lost"

    # -- invariants (checked after each step)

    @invariant()
    def pages_are_conserved(self) -> None:
        """Every page is either free or cached, and no page is cached twice."""
        assert sorted(self.free + self.rig.cached_pages()) == list(range(_NUM_PAGES)), "a page is lost, or owned twice"

    @invariant()
    def the_tree_agrees_with_the_dictionary(self) -> None:
        """`walk` yields each prefix with its page, and each node with its number of locks."""
        walked: dict[_Prefix, int] = {}
        ends: dict[int, bytes] = {}
        for view in self.cache.walk():
            tokens = b"" if view.parent_id is None else ends[view.parent_id]
            assert view.stats.depth == len(tokens) // 4, "stats.depth is not the number of tokens before the node"
            assert view.stats.tokens == len(view.token_ids), "stats.tokens is not the number of the node's tokens"
            for page, run in zip(view.pages.tolist(), view.token_ids.reshape(-1, self.page_size), strict=True):
                tokens += run.tobytes()
                walked[view.namespace, tokens] = page
            ends[view.node_id] = tokens
            assert view.num_locks == self._num_locks((view.namespace, tokens)), (
                "num_locks is not the number of locks on or below the node"
            )
        assert walked == self.model.pages, "the tree and the dictionary differ"

    @invariant()
    def counters_are_right(self) -> None:
        """`locked_pages` and `evictable_pages` agree with the locked handles."""
        num_locked = sum(self._num_locks(prefix) > 0 for prefix in self.model.pages)
        assert self.cache.locked_pages == num_locked, "locked_pages is wrong"
        assert self.cache.evictable_pages == len(self.model.pages) - num_locked, "evictable_pages is wrong"

    @invariant()
    def the_version_grows_with_changes(self) -> None:
        """`version` grows when prefixes are added or evicted, and never decreases."""
        version, prefixes = self.seen
        self.seen = (self.cache.version, frozenset(self.model.pages))
        assert self.cache.version >= version, "the version decreased"
        assert self.cache.version > version or self.seen[1] == prefixes, "the content changed, but not the version"

    @invariant()
    def the_strategy_knows_all_nodes(self) -> None:
        """The nodes that the strategy's hooks have reported are the nodes that `walk` yields."""
        assert {view.stats for view in self.cache.walk()} == self.rig.strategy.live, "hooks and walk() differ"

    @invariant()
    def events_agree_with_the_tree(self) -> None:
        """A replay of the events gives the tree that `walk` yields."""
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
        """Return the number of locks that protect a prefix: locks of handles at the prefix or below it."""
        namespace, tokens = prefix
        return sum(
            request.num_locks
            for request in self.requests
            if request.key.namespace == namespace
            and self.model.prefix(request.key, request.handle.num_pages)[1].startswith(tokens)
        )

    def _hand_back(self, gone: list[int]) -> None:
        locked = [page for prefix, page in self.model.pages.items() if self._num_locks(prefix)]
        assert not set(gone) & set(locked), "a locked page was evicted"
        assert set(gone) <= set(self.model.pages.values()), "the cache returned a page that was not cached"
        self.model.forget(gone)
        self.free += gone


class _EvictionOrder:
    """The strategy's priorities of all nodes before an eviction, to check the eviction order."""

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
        """Check that each evicted node was an unlocked leaf with the lowest priority when it was evicted."""
        for stats in evicted:
            leaves = [other for other in self._unlocked if self._num_children[other] == 0]
            assert stats in leaves, "evict() took a node that was locked or had children"
            lowest = min(self._priority[leaf] for leaf in leaves)
            assert self._priority[stats] == lowest, "evict() did not take the leaf with the lowest priority"
            self._unlocked.remove(stats)
            parent_id = self._parent[stats]
            if parent_id is not None:
                self._num_children[self._stats[parent_id]] -= 1
