"""A prefix cache for tests, with a clock, a strategy, a record of events, and a counter of page ids."""

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

#: The result of `CacheRig.snapshot`: the structure and the statistics of every node, as plain values.
Snapshot = list[tuple[object, ...]]


def prompt(page_size: int, *letters: int, tail: int = 0) -> TokenIds:
    """Return one page of tokens per letter, followed by `tail` tokens, int32 [n].

    Pages of different letters differ only in the last token, so a cache cannot distinguish pages by the first token.
    """
    pages = np.zeros((len(letters), page_size), dtype=np.int32)
    pages[:, -1] = letters
    return np.concatenate([pages.ravel(), np.full(tail, 7, dtype=np.int32)])


class CacheRig:
    """A cache with its dependencies, and short methods for tests.

    Attributes:
        cache: the cache.
        page_size: number of tokens in a page.
        clock: the cache's clock.
        strategy: the cache's eviction strategy.
        events: the cache's events so far.
        mirror: the tree that is built from the events.
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
        """Check that the tree built from the events so far equals the tree that `walk` yields."""
        mirrored = {
            node_id: (node.parent_id, node.namespace, node.token_ids.tolist())
            for node_id, node in self.mirror.nodes.items()
        }
        walked = {v.node_id: (v.parent_id, v.namespace, v.token_ids.tolist()) for v in self.cache.walk()}
        assert mirrored == walked, "replaying the events does not give the tree that walk() yields"

    def key(self, *letters: int, tail: int = 0, namespace: str = "", priority: int = 0) -> PrefixKey:
        """Return the key of `prompt(*letters)`."""
        return PrefixKey(prompt(self.page_size, *letters, tail=tail), namespace, priority)

    def new_pages(self, num_pages: int) -> PageIds:
        """Return unused page ids."""
        first = self._next_page
        self._next_page += num_pages
        return np.arange(first, self._next_page, dtype=np.int32)

    def num_pages(self, key: PrefixKey) -> int:
        """Return the number of whole pages of a key."""
        return len(key.token_ids) // self.page_size

    def insert(self, key: PrefixKey, handle: PrefixHandle | None = None) -> InsertResult:
        """Insert new pages for the part of a key after a handle; None: after the key's match."""
        start = handle if handle is not None else self.cache.match(key).handle
        return self.cache.insert(key, self.new_pages(self.num_pages(key) - start.num_pages), start)

    def hold(self, key: PrefixKey) -> PrefixHandle:
        """Match a key; lock and return the handle of the match."""
        handle = self.cache.match(key).handle
        self.cache.lock(handle)
        return handle

    def matched(self, key: PrefixKey, resume: PrefixHandle | None = None) -> list[int]:
        """Return the page ids of a match."""
        return as_list(self.cache.match(key, resume).pages)

    def snapshot(self) -> Snapshot:
        """Return the nodes of `walk` as plain values."""
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
        """Return the nodes that have any of the pages, parents first."""
        return [view for view in self.cache.walk() if set(view.pages.tolist()) & {int(page) for page in pages}]

    def cached_pages(self) -> list[int]:
        """Return the page ids of all nodes of `walk`, sorted."""
        return sorted(page for view in self.cache.walk() for page in view.pages.tolist())


def as_list(pages: PageIds) -> list[int]:
    """Return page ids as a list; check that they are an int32 array [n]."""
    assert isinstance(pages, np.ndarray), f"pages must be a numpy array, got {type(pages).__name__}"
    assert pages.dtype == np.int32, f"pages must be int32, got {pages.dtype}"
    assert pages.ndim == 1, f"pages must have one dimension, got {pages.ndim}"
    ids: list[int] = pages.tolist()
    return ids
