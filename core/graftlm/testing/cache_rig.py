"""A prefix cache on a test bench: with a clock, a strategy, an event log and page numbers of its own."""

from collections.abc import Callable, Sequence

import numpy as np

from graftlm.contracts import (
    CacheContext,
    EvictionStrategy,
    InsertResult,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
)
from graftlm.records import CacheEvent
from graftlm.testing.event_mirror import EventMirror
from graftlm.testing.recording import RecordingStrategy, TickingClock
from graftlm.types import PageIds, TokenIds

__all__ = ["CacheRig", "Snapshot", "prompt"]

#: What `CacheRig.snapshot` returns: every node's structure and statistics, as plain values.
Snapshot = list[tuple[object, ...]]


def prompt(page_size: int, *letters: int, tail: int = 0) -> TokenIds:
    """Return the tokens of one page per letter, and `tail` tokens more.

    Pages of different letters differ in their last token only, so that no cache can tell them apart by a look at
    their first.
    """
    pages = np.zeros((len(letters), page_size), dtype=np.int32)
    pages[:, -1] = letters
    return np.concatenate([pages.ravel(), np.full(tail, 7, dtype=np.int32)])


class CacheRig:
    """Creates a cache and keeps what tests ask of it short.

    Attributes:
        cache: the cache.
        page_size: tokens in a page.
        clock: its clock.
        strategy: its eviction strategy.
        events: what it said to `on_event`.
        mirror: the tree that these events tell.
    """

    def __init__(
        self,
        create: Callable[[CacheContext], PrefixCache],
        page_size: int,
        inner_strategy: EvictionStrategy | None = None,
    ) -> None:
        self.page_size = page_size
        self.clock = TickingClock()
        self.strategy = RecordingStrategy(inner_strategy)
        self.events: list[CacheEvent] = []
        self.mirror = EventMirror()
        self._next_page = 0
        context = CacheContext(
            page_size=page_size,
            eviction=self.strategy,
            clock=self.clock,
            on_event=self._listen,
        )
        self.cache = create(context)

    def _listen(self, event: CacheEvent) -> None:
        self.events.append(event)
        self.mirror(event)

    def check_mirror(self) -> None:
        """Fail unless the events so far tell the tree that `walk` shows."""
        told = {
            node_id: (node.parent_id, node.namespace, node.token_ids.tolist())
            for node_id, node in self.mirror.nodes.items()
        }
        shown = {v.node_id: (v.parent_id, v.namespace, v.token_ids.tolist()) for v in self.cache.walk()}
        assert told == shown, "the events do not tell the tree that walk() shows"

    def key(self, *letters: int, tail: int = 0, namespace: str = "", priority: int = 0) -> PrefixKey:
        """Return the key of `prompt(*letters)`."""
        return PrefixKey(prompt(self.page_size, *letters, tail=tail), namespace, priority)

    def new_pages(self, num_pages: int) -> PageIds:
        """Return page ids that nobody has seen."""
        first = self._next_page
        self._next_page += num_pages
        return np.arange(first, self._next_page, dtype=np.int32)

    def num_pages(self, key: PrefixKey) -> int:
        """Return the number of whole pages of a key."""
        return len(key.token_ids) // self.page_size

    def insert(self, key: PrefixKey, handle: PrefixHandle | None = None) -> InsertResult:
        """Insert new pages for all of a key past a handle, which is matched first unless given."""
        start = handle if handle is not None else self.cache.match(key).handle
        return self.cache.insert(key, self.new_pages(self.num_pages(key) - start.num_pages), start)

    def hold(self, key: PrefixKey) -> PrefixHandle:
        """Match a key and lock where the match ends."""
        handle = self.cache.match(key).handle
        self.cache.lock(handle)
        return handle

    def matched(self, key: PrefixKey, resume: PrefixHandle | None = None) -> list[int]:
        """Return the pages a match finds."""
        return as_list(self.cache.match(key, resume).pages)

    def snapshot(self) -> Snapshot:
        """Return all that `walk` shows, copied."""
        return [
            (
                view.node_id,
                view.parent_id,
                view.namespace,
                view.token_ids.tolist(),
                view.pages.tolist(),
                view.num_locks,
                view.stats.last_access,
                view.stats.hits,
                view.stats.tokens,
                view.stats.depth,
                view.stats.priority,
            )
            for view in self.cache.walk()
        ]

    def views_of(self, pages: Sequence[int] | PageIds) -> list[NodeView]:
        """Return the nodes that hold any of the pages, parents first."""
        return [view for view in self.cache.walk() if set(view.pages.tolist()) & {int(page) for page in pages}]

    def cached_pages(self) -> list[int]:
        """Return all pages that `walk` shows, sorted."""
        return sorted(page for view in self.cache.walk() for page in view.pages.tolist())


def as_list(pages: PageIds) -> list[int]:
    """Return page ids as a list, after a look at their type."""
    assert isinstance(pages, np.ndarray), f"pages must be a numpy array, got {type(pages).__name__}"
    assert pages.dtype == np.int32, f"pages must be int32, got {pages.dtype}"
    assert pages.ndim == 1, f"pages must have one dimension, got {pages.ndim}"
    ids: list[int] = pages.tolist()
    return ids
