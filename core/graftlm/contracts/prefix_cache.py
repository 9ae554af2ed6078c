"""The contract of a prefix cache: which pages hold the keys and values of which token prefix.

A cache knows prefixes. It owns no tensors, never allocates a page, and never returns one to the pool by itself: `evict`
and `reset` hand pages back to the caller. A page is `page_size` consecutive tokens; only whole pages are ever cached.
No torch import is needed to write one.

    tokens    0 .......................................... len(key)
    pages     |  held by the cache  |  given by insert  | partial page: the caller's, never seen here
              |<- existing_pages  ->|                   |
              |<-           cached_pages              ->|
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts.eviction import EvictionStrategy, NodeStats
from graftlm.contracts.storage import KVStorage
from graftlm.contracts.transfer import KVTransfer
from graftlm.contracts.window import WindowEviction, WindowView
from graftlm.records import CacheEvent
from graftlm.types import PageIds, TokenIds

__all__ = [
    "CacheCapabilities",
    "CacheContext",
    "InsertResult",
    "NodeView",
    "PrefixCache",
    "PrefixHandle",
    "PrefixKey",
    "PrefixMatch",
    "ProbePlace",
]

#: No pages: int32, shape [0]; shared and read-only.
NO_PAGES: NDArray[np.int32] = np.empty(0, dtype=np.int32)
NO_PAGES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """What a prefix is looked up by.

    Attributes:
        token_ids: int32 [n], C-contiguous. The caller may overwrite the array when the call returns: a cache that keeps
            tokens keeps a copy, also of those that it shows in `NodeView`, `CacheEvent` and pins.
        namespace: keys of different namespaces (LoRA adapter, cache salt, tenant) never share a page.
        priority: the request's priority, for strategies that weigh it.
    """

    token_ids: TokenIds
    namespace: str = ""
    priority: int = 0


class PrefixHandle(Protocol):
    """A place in the cache, opaque to callers. It stays valid while it is locked."""

    @property
    def num_pages(self) -> int:
        """Pages from the start of the prompt to this place."""
        ...


class ProbePlace(Protocol):
    """Where a probe ended, for the next probe of the same key to start from; opaque to callers."""

    @property
    def num_pages(self) -> int:
        """Pages that a match would have found then."""
        ...


@dataclass(frozen=True, slots=True)
class _Probed:
    num_pages: int


@dataclass(slots=True)  # not frozen: freezing would be a tenth of what a match costs
class PrefixMatch:
    """The longest cached prefix of a key.

    Attributes:
        handle: where the match ends; to lock, and to resume from.
        pages: int32 [m], page ids from the resumed handle (or the start) to the end of the match.
    """

    handle: PrefixHandle
    pages: PageIds


@dataclass(slots=True)  # not frozen, for the same reason
class InsertResult:
    """What became of the pages given to `insert`, counted from the start of the prompt.

    Attributes:
        existing_pages: the cache held these before. The caller's own copies among them are duplicates, for the caller
            to free; it reads `pages` instead.
        cached_pages: the cache owns the caller's pages from `existing_pages` up to here. Pages from here on stay the
            caller's: a cache may take fewer than it is offered, or none.
        handle: the place at `cached_pages`; not locked yet.
        pages: int32 [cached_pages - given handle's num_pages], the page ids the cache holds for the key past the handle
            that was given. It may be the very array that was given.
    """

    existing_pages: int
    cached_pages: int
    handle: PrefixHandle
    pages: PageIds


@dataclass(frozen=True, slots=True)
class NodeView:
    """A read-only look at one node, for tools and tests.

    Attributes:
        node_id: unique in this cache's life.
        parent_id: None for a node at the start of a prompt.
        token_ids: int32 [pages * page_size], this node's own run; read-only, and never an array of a caller.
        pages: int32, this node's own pages; likewise.
        num_locks: handles that hold it.
        num_pins: pins that end at it.
        has_window: whether its pages have window pages; True where layers share one memory.
    """

    node_id: int
    parent_id: int | None
    namespace: str
    token_ids: TokenIds
    pages: PageIds
    num_locks: int
    stats: NodeStats
    num_pins: int = 0
    has_window: bool = True


@dataclass(frozen=True, slots=True)
class CacheCapabilities:
    """What core may ask of a cache without knowing its class.

    Attributes:
        reuses: whether a match can ever be longer than nothing.
        window: whether it can keep a page without its window page. Only then do sliding-window layers get a memory of
            their own.
        tiers: whether it is a `TieredPrefixCache`, to be given a `transfer`.
        granularity_tokens: prefixes are shared in multiples of this many tokens only (and of whole pages): what
            `PrefixCacheConformance.granularity_tokens` is in `graftlm plugins check`.
    """

    reuses: bool = True
    window: bool = False
    tiers: bool = False
    granularity_tokens: int = 1


@dataclass(frozen=True, slots=True)
class CacheContext:
    """What a cache is created with.

    Attributes:
        page_size: tokens in a page.
        eviction: orders the leaves.
        clock: seconds, monotonic; the only time a cache knows.
        on_event: called for every node that comes, is split or goes; None when nobody listens. See `CacheEvent`.
        window: tells which pages have window pages; None where all layers share one memory.
        transfer: copies pages to and from host memory; None for a cache whose capabilities name no tiers, and for one
            that follows a cache that failed, when host memory or storage cannot be had again: it is its device tier.
        create_storage: from a storage provider's name, its options and a block's bytes to a storage; None likewise.
    """

    page_size: int
    eviction: EvictionStrategy
    clock: Callable[[], float]
    on_event: Callable[[CacheEvent], None] | None = field(default=None)
    window: WindowView | None = None
    transfer: KVTransfer | None = None
    create_storage: Callable[[str, Mapping[str, Any], int], KVStorage] | None = None


class PrefixCache(ABC):
    """A map from token prefixes to KV pages.

    Invariants, each checked by `graftlm.testing.PrefixCacheConformance`:
        - A match's pages are those that inserts gave for exactly the matched tokens in that namespace, and the match is
          page-aligned and the longest possible, in whole blocks where a cache declares a coarser granularity.
        - After `insert(key, pages, handle)` with a cache that took everything, `match(key)` returns `result.pages`.
        - Arrays that a call was given belong to the caller: what becomes of them afterwards changes nothing that the
          cache holds or shows.
        - A page is owned once: it is in the cache, or was handed back by `evict`/`reset`, never both.
        - `evictable_pages + locked_pages` is the number of pages `walk` shows.
        - `evict(n)` returns at least min(n, evictable_pages) pages (whole nodes may go, so it can be more), never
          a page on a locked path.
        - Locks balance: n locks of a handle need n unlocks; a path is locked while any handle on or below it is.
        - A handle stays valid while locked, through splits by other keys, and keeps its `num_pages`.
        - Matching from a resumed handle gives what matching from the start would, less the pages up to that handle.
        - `probe` and `probe_again` change nothing: neither recency nor hits nor structure, and they agree.
        - A pin is a wish: a pinned prefix outlives everything that is not pinned, until its time is up, and goes when
          nothing else is left, that which would end first at first. It counts as evictable.
        - Namespaces never share.
        - Events tell the content: who replays them (see `CacheEvent`) holds the tree that `walk` shows.
        - `eviction_age_s`, where it is kept, is the time since the last use of what `evict` gave up last.

    With a `WindowView`, a request can go on from a place only if the `reach_pages` pages in front of it (or all, if
    there are fewer) have window pages. "The longest possible" match then means the longest of which this is true. What
    a new page has is read from the view when it is inserted. When `insert` is offered a page that has a window page,
    for tokens whose cached page has none, the cached page takes it over: the caller moves it, the cache counts it.
    """

    @abstractmethod
    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix of a key.

        Args:
            key: the tokens; a trailing partial page is ignored.
            resume: a locked handle that is a prefix of the key; matching goes on from there, and the nodes up to it are
                not visited again.

        Effects: touches the recency of what it passes, and counts a hit there (not again below a resumed handle's
            depth); may split a node. Locks nothing.
        """

    @abstractmethod
    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Offer pages for the whole pages of a key.

        Args:
            key: the tokens; a trailing partial page is ignored.
            pages: int32 [p], page ids of the key's whole pages past `handle`:
                p = len(token_ids) // page_size - handle.num_pages.
            handle: a locked handle (or one just matched) that is a prefix of the key.

        Effects: takes ownership of the pages between `existing_pages` and `cached_pages`; frees nothing. Changes no
            lock: the caller locks the returned handle and unlocks its old one. The ids in `pages` are copied.
        """

    @abstractmethod
    def lock(self, handle: PrefixHandle) -> None:
        """Keep the path to a handle from eviction until `unlock`."""

    @abstractmethod
    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`."""

    @abstractmethod
    def evict(self, num_pages: int) -> PageIds:
        """Give up at least `num_pages` evictable pages if there are as many, leaves first, in the strategy's order.

        Returns: int32, the page ids given up; the caller returns them to the pool.
        """

    @abstractmethod
    def reset(self) -> PageIds:
        """Forget everything that is not locked.

        Returns: int32, the page ids given up. Locked paths stay.
        """

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Pages `evict` could give up now. O(1)."""

    @property
    @abstractmethod
    def locked_pages(self) -> int:
        """Pages on locked paths. O(1)."""

    @property
    def eviction_age_s(self) -> float | None:
        """How long what `evict` gave up last had not been used, in seconds; None before, or when it is not kept.

        It tells operators whether the memory is large enough: what goes after seconds would have been reused.
        """
        return None

    @abstractmethod
    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children."""

    @property
    @abstractmethod
    def version(self) -> int:
        """A number that grows whenever the answer of `probe` may have changed."""

    @abstractmethod
    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages a match would find, changing nothing. Schedulers ask this of waiting requests."""

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Probe, starting from where the last probe of this very key ended.

        Schedulers ask this of every waiting request whenever something changed, so it should cost O(1) when nothing
        changed there. Without an implementation of its own, a cache probes from the start.

        Args:
            key: the tokens.
            place: the answer of the last call with the same key; None the first time.

        Returns: where a match would end; None when nothing is cached of the key.
        """
        num_pages = self.probe(key)
        return _Probed(num_pages) if num_pages else None

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Keep the cached part of a key from eviction for `ttl_s` seconds, while anything else can go.

        Effects: touches recency as a match does, but counts no hit. Pinning the same key again sets its time anew.

        Returns: pages kept; 0 when nothing of it is cached, this cache does not pin, or has as many pins as it takes.
        """
        return 0

    def unpin(self, key: PrefixKey) -> bool:
        """End a pin before its time. Returns: whether this very key was pinned."""
        return False

    # What follows is asked only of a cache that declares `window`, and was given a `WindowView`.

    @property
    def evictable_window_pages(self) -> int:
        """Window pages `evict_window` could make free now. O(1)."""
        return 0

    def lock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Keep the window pages of the last `num_pages` pages before a locked handle until `unlock_window`.

        Locking the handle alone keeps its pages, not their window pages.
        """

    def unlock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Undo one `lock_window` of the same handle and length; the handle is still locked."""

    def evict_window(self, num_pages: int) -> WindowEviction:
        """Give up at least `num_pages` window pages that are not locked, if there are as many.

        A page may lose its window page and stay in the cache: it goes on serving the layers without a window, and
        prompts that end far behind it.
        """
        return WindowEviction(NO_PAGES, NO_PAGES)
