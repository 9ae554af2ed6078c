"""The contract of a prefix cache, which maps token prefixes to the pages of their keys and values.

A cache owns no tensors. It never allocates a page and never returns a page to the pool: `evict` and `reset` return
pages to the caller. A page is `page_size` consecutive tokens; only whole pages are cached. A cache need not import
torch.

    tokens    0 .......................................... len(key)
    pages     |  held by the cache  |  given by insert  | partial page: the caller's, never cached
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

_NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
_NO_TOKENS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """The key of a prefix.

    Attributes:
        token_ids: int32 [n], C-contiguous. The caller may overwrite the array after the call, so a cache stores copies
            of tokens, also in `NodeView`, `CacheEvent` and pins.
        namespace: namespace of the prefix, made of adapter and cache salt. Keys of different namespaces never share
            pages.
        priority: the request's priority, for eviction strategies that use it.
    """

    token_ids: TokenIds
    namespace: str = ""
    priority: int = 0


class PrefixHandle(Protocol):
    """A place in the cache, opaque to callers. It stays valid while it is locked."""

    @property
    def num_pages(self) -> int:
        """Number of pages from the start of the prompt to this place."""
        ...


class ProbePlace(Protocol):
    """The end of a probe, where the next probe of the same key starts; opaque to callers."""

    @property
    def num_pages(self) -> int:
        """Number of pages that a match would have found at the time of the probe."""
        ...


@dataclass(frozen=True, slots=True)
class _Probed:
    num_pages: int


@dataclass(slots=True)  # not frozen: a frozen dataclass adds a tenth to the time of a match
class PrefixMatch:
    """The longest cached prefix of a key.

    Attributes:
        handle: the end of the match; callers can lock it, and resume a later match from it.
        pages: int32 [m], page ids from the resumed handle (or the start) to the end of the match.
    """

    handle: PrefixHandle
    pages: PageIds


@dataclass(slots=True)  # not frozen, for the same reason
class InsertResult:
    """The result of `insert`, in pages counted from the start of the prompt.

    Attributes:
        existing_pages: number of pages that were cached before. The caller's copies of them are duplicates: the caller
            frees them and uses `pages` instead.
        cached_pages: number of pages that are cached now. The cache owns the caller's pages from `existing_pages` to
            `cached_pages`. The caller keeps the later pages: a cache may take fewer pages than offered, or none.
        handle: the place at `cached_pages`; not locked.
        pages: int32 [cached_pages - num_pages of the given handle], the cached page ids of the key after the given
            handle. It may be the array that the caller passed.
    """

    existing_pages: int
    cached_pages: int
    handle: PrefixHandle
    pages: PageIds


@dataclass(frozen=True, slots=True)
class NodeView:
    """A read-only view of one node, for tools and tests.

    Attributes:
        node_id: unique in one cache object.
        parent_id: None for a node at the start of a prompt.
        token_ids: int32 [pages * page_size], this node's own tokens; read-only, and never a caller's array.
        pages: int32, this node's own pages; read-only, and never a caller's array.
        num_locks: number of handles that lock the node.
        num_pins: number of pins that end at the node.
        has_window: whether the node's pages have window pages; True if all layers share one memory.
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
    """The features that a cache supports.

    Attributes:
        reuses: whether a match can contain pages.
        window: whether the cache can keep a page without its window page. Sliding-window layers have their own memory
            only if this is True.
        tiers: whether the cache is a `TieredPrefixCache`, which needs a `transfer`.
        granularity_tokens: prefixes are shared only in multiples of this many tokens (and of whole pages). `graftlm
            plugins check` uses it as `PrefixCacheConformance.granularity_tokens`.
    """

    reuses: bool = True
    window: bool = False
    tiers: bool = False
    granularity_tokens: int = 1


@dataclass(frozen=True, slots=True)
class CacheContext:
    """The arguments of a cache's `create`.

    Attributes:
        page_size: number of tokens in a page.
        eviction: the strategy that orders the leaves.
        clock: monotonic, in seconds; the only clock that a cache may read.
        on_event: function that is called for every node that is inserted, split or evicted; None: no events are needed.
            See `CacheEvent`.
        window: view that returns which pages have window pages; None if all layers share one memory.
        transfer: copies pages to and from host memory. None for a cache without `tiers`. Also None for a tiered cache
            that replaces a failed one, if host memory or storage is not available again; the new cache then has only
            its device tier.
        create_storage: function that creates a storage from a storage provider's name, its options and the bytes of a
            block; None in the same cases as `transfer`.
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
        - A match's pages are the pages that were inserted for exactly the matched tokens in that namespace. The match
          is page-aligned and the longest possible, in whole blocks if the cache declares a coarser granularity.
        - After an `insert(key, pages, handle)` that took all pages, `match(key)` returns `result.pages`.
        - The caller owns the arrays that it passes: later changes to them change nothing in the cache or its results.
        - A page has one owner: it is in the cache, or `evict` or `reset` returned it, never both.
        - `evictable_pages + locked_pages` is the number of pages of all nodes of `walk`.
        - `evict(n)` returns at least min(n, evictable_pages) pages (more if it evicts whole nodes), never a page on a
          locked path.
        - Locks are counted: n locks of a handle need n unlocks. A path is locked while a handle at its end or below is
          locked.
        - A locked handle stays valid and keeps its `num_pages`, also when other keys split its path.
        - A match from a resumed handle gives the same result as a match from the start, without the pages up to that
          handle.
        - `probe` and `probe_again` return the same result and change nothing: not recency, hits or structure.
        - `continuation` changes nothing; the key followed by the result is the start of an inserted key of the
          namespace.
        - Until its time is over, a pinned prefix is evicted only if no unpinned leaf is left; the pin that ends first
          is evicted first. Pinned pages count as evictable.
        - Namespaces never share pages.
        - Replaying all events (see `CacheEvent`) gives the tree that `walk` returns.
        - `eviction_age_s`, if measured, is the time between the last use and the eviction of the node that was last
          evicted.

    With a `WindowView`, a request can continue from a place only if the `reach_pages` pages before the place (or all,
    if there are fewer) have window pages. "The longest possible" match is then the longest for which this is true.
    `insert` reads from the view whether a new page has a window page. If the cached page of some tokens has no window
    page, and a page with a window page is offered for the same tokens, the cached page gets that window page: the
    caller moves it, and the cache counts it.
    """

    @abstractmethod
    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix of a key.

        Args:
            key: the tokens; a trailing partial page is ignored.
            resume: a locked handle that is a prefix of the key. The match starts at this handle and does not visit the
                nodes up to it again.

        Effects: updates recency and counts a hit in all nodes of the match, but counts no hit in nodes up to a resumed
            handle. It may split a node. It locks nothing.
        """

    @abstractmethod
    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Offer pages for the whole pages of a key.

        Args:
            key: the tokens; a trailing partial page is ignored.
            pages: int32 [p], page ids of the key's whole pages past `handle`:
                p = len(token_ids) // page_size - handle.num_pages.
            handle: a locked handle, or the handle of the latest match, that is a prefix of the key.

        Effects: the cache becomes the owner of the pages between `existing_pages` and `cached_pages`; it frees nothing.
            Locks do not change: the caller locks the returned handle and unlocks the old one. The ids in `pages` are
            copied.
        """

    @abstractmethod
    def lock(self, handle: PrefixHandle) -> None:
        """Protect the path to a handle from eviction until `unlock`."""

    @abstractmethod
    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`."""

    @abstractmethod
    def evict(self, num_pages: int) -> PageIds:
        """Evict at least `num_pages` pages, or all evictable pages if there are fewer; leaves first, in strategy order.

        Returns: int32, the evicted page ids; the caller returns them to the pool.
        """

    @abstractmethod
    def reset(self) -> PageIds:
        """Remove all nodes that are not locked.

        Returns: int32, the removed page ids. Locked paths remain.
        """

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Number of pages that `evict` could return now. O(1)."""

    @property
    @abstractmethod
    def locked_pages(self) -> int:
        """Number of pages on locked paths. O(1)."""

    @property
    def eviction_age_s(self) -> float | None:
        """Seconds between last use and eviction of the last evicted node; None before an eviction, or if not measured.

        A short age shows that the memory is too small: content that is evicted after seconds would have been reused.
        """
        return None

    @abstractmethod
    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Counter that increases whenever the result of a `probe` may have changed."""

    @abstractmethod
    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find; change nothing. Called for waiting requests."""

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Probe from the end of the last probe of the same key.

        The scheduler calls this method for every waiting request after each change of `version`, so it should take O(1)
        if nothing changed at that place. The default implementation probes from the start.

        Args:
            key: the tokens.
            place: the result of the last call with the same key; None in the first call.

        Returns: the end of a match; None if no page of the key is cached.
        """
        num_pages = self.probe(key)
        return _Probed(num_pages) if num_pages else None

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return tokens that follow a key in the cache, for speculative decoding; change nothing.

        Args:
            key: the tokens; they need not be whole pages.
            num_tokens: maximum number of tokens to return.

        Returns: int32 [m], tokens that were inserted after exactly this key in its namespace. If the key has several
            continuations, the most recently used one is returned. The array is empty if the key is not cached to its
            end, or nothing follows it. The default implementation never finds a continuation.
        """
        return _NO_TOKENS

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Evict the cached part of a key last, for `ttl_s` seconds.

        Effects: updates recency as a match does, but counts no hit. Pinning the same key again restarts its time.

        Returns: number of pinned pages; 0 if no page of the key is cached, this cache does not support pins, or the
            limit of pins is reached.
        """
        return 0

    def unpin(self, key: PrefixKey) -> bool:
        """Remove a pin before its time is over. Returns: whether exactly this key was pinned."""
        return False

    # The methods below are called only for a cache with the capability `window` and a `WindowView`.

    @property
    def evictable_window_pages(self) -> int:
        """Number of window pages that `evict_window` could free now. O(1)."""
        return 0

    def lock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Protect the window pages of the last `num_pages` pages before a locked handle until `unlock_window`.

        Locking the handle protects its pages, not their window pages.
        """

    def unlock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Undo one `lock_window` of the same handle and length; the handle is still locked."""

    def evict_window(self, num_pages: int) -> WindowEviction:
        """Evict at least `num_pages` unlocked window pages, or all of them if there are fewer.

        A page may lose its window page and stay in the cache. Such a page still serves the layers without a window, and
        prompts that continue for more than a window after it.
        """
        return WindowEviction(NO_PAGES, NO_PAGES)
