"""The contract of a prefix cache, which maps token prefixes to the pages of their keys and values.

A cache owns no tensors. It does not allocate pages and does not return pages to the pool: `evict` and `reset` return
them to the caller. A page has `page_size` consecutive tokens; only whole pages are cached. A cache need not import
torch.

    tokens    0 .......................................... len(key)
    pages     |    in the cache     |   newly inserted  | partial page: not cached
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
from graftlm.contracts.state import StateView
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
        token_ids: int32 [n], C-contiguous. The caller may overwrite the array after the call. A cache therefore stores
            copies of tokens, also in `NodeView`, `CacheEvent` and pins.
        namespace: namespace of the prefix, computed from adapter and cache salt. Keys of different namespaces do not
            share pages.
        priority: the request's priority, for eviction strategies that use it.
    """

    token_ids: TokenIds
    namespace: str = ""
    priority: int = 0


class PrefixHandle(Protocol):
    """A position in a cached prefix, opaque to callers. It stays valid while it is locked."""

    @property
    def num_pages(self) -> int:
        """Number of pages from the start of the prompt to this position."""
        ...


class ProbePlace(Protocol):
    """The end of a probe, opaque to callers. The next probe of the same key starts here."""

    @property
    def num_pages(self) -> int:
        """Number of pages that a match would have found at the time of the probe."""
        ...


@dataclass(frozen=True, slots=True)
class _Probed:
    num_pages: int


@dataclass(slots=True)  # not frozen, because a frozen dataclass makes a match take 10 % longer
class PrefixMatch:
    """The longest cached prefix of a key.

    Attributes:
        handle: the end of the match. Callers can lock the handle, and resume a later match from it.
        pages: int32 [m], page ids from the resumed handle to the end of the match; without a resumed handle, from the
            start.
        found_pages: with a `StateView`, number of pages from the start of the prompt that are cached, including pages
            after the end of the match; else None.
    """

    handle: PrefixHandle
    pages: PageIds
    found_pages: int | None = None


@dataclass(slots=True)  # not frozen, because frozen dataclasses are slower to create
class InsertResult:
    """The result of `insert`, in pages counted from the start of the prompt.

    Attributes:
        existing_pages: number of pages that were already cached. The caller's pages for the same tokens are duplicates:
            the caller frees the duplicates and uses `pages` instead.
        cached_pages: number of pages that are cached now. The cache owns the caller's pages from `existing_pages` to
            `cached_pages`. The caller still owns later pages, because a cache may insert only some of the pages or
            none.
        handle: the position after `cached_pages` pages; it is not locked.
        pages: int32 [cached_pages - num_pages of the passed handle], the cached page ids of the key after the passed
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
        node_id: id of the node, unique in one cache object.
        parent_id: id of the parent node; None for a node at the start of a prompt.
        token_ids: int32 [pages * page_size], the tokens of this node, without those of its ancestors; read-only. The
            array is the cache's own, not an array that a caller passed.
        pages: int32, page ids of these tokens; read-only, also the cache's own array.
        num_locks: number of handles that lock the node.
        num_pins: number of pins that end at the node.
        has_window: whether the node's pages have window pages; always True if all layers share one memory.
        num_states: number of the node's pages at whose end a recurrent state is stored.
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
    num_states: int = 0


@dataclass(frozen=True, slots=True)
class CacheCapabilities:
    """The features that a cache supports.

    Attributes:
        reuses: whether the cache reuses prefixes; if False, every match is empty.
        window: whether the cache can evict a window page and keep its page. Sliding-window layers have their own memory
            only if this is True.
        state: whether the cache supports models with a recurrent state: with a `StateView`, matches end where a state
            is stored. Other caches are refused for such models.
        tiers: whether the cache is a `TieredPrefixCache`, whose context has a `transfer`.
        granularity_tokens: unit of sharing in tokens: shared prefixes are multiples of this number and of the page
            size. `graftlm plugins check` uses it as `PrefixCacheConformance.granularity_tokens`.
    """

    reuses: bool = True
    window: bool = False
    state: bool = False
    tiers: bool = False
    granularity_tokens: int = 1


@dataclass(frozen=True, slots=True)
class CacheContext:
    """The arguments of a cache's `create`.

    Attributes:
        page_size: number of tokens in a page.
        eviction: the eviction strategy.
        clock: monotonic clock in seconds; a cache must not read any other clock.
        on_event: function that is called for every node that is inserted, split or evicted; None: no events are needed.
            See `CacheEvent`.
        window: view that returns which pages have window pages; None if all layers share one memory.
        states: view that returns at which pages' ends a recurrent state is stored; None if the model has no such state.
        transfer: copies pages to and from host memory; None for a cache without `tiers`. It is also None for a tiered
            cache that replaces a failed cache, if host memory or storage cannot be created again; the new cache then
            has only its device tier.
        create_storage: function that creates a storage from a provider's name, its options and the size of a block in
            bytes; None if `transfer` is None.
    """

    page_size: int
    eviction: EvictionStrategy
    clock: Callable[[], float]
    on_event: Callable[[CacheEvent], None] | None = field(default=None)
    window: WindowView | None = None
    transfer: KVTransfer | None = None
    create_storage: Callable[[str, Mapping[str, Any], int], KVStorage] | None = None
    states: StateView | None = None


class PrefixCache(ABC):
    """A map from token prefixes to KV pages.

    Invariants, each checked by `graftlm.testing.PrefixCacheConformance`:
        - A match's pages are the pages that were inserted for exactly the matched tokens in that namespace. The match
          is the longest possible in whole pages, or in multiples of `granularity_tokens`.
        - If `insert(key, pages, handle)` has inserted all pages, `match(key)` returns `result.pages`.
        - The caller owns the arrays that it passes. Later changes to these arrays do not affect the cache or its
          results.
        - A page has one owner: the cache, or the caller after `evict` or `reset` has returned the page.
        - `evictable_pages + locked_pages` is the number of pages of all nodes of `walk`.
        - `evict(n)` returns at least min(n, evictable_pages) pages, or more if it evicts whole nodes. It returns no
          page on a locked path.
        - Locks are counted: n calls of `lock` need n calls of `unlock`. A path is locked while a handle at its end or
          below its end is locked.
        - A locked handle stays valid with the same `num_pages`, even if other keys split its path.
        - A match from a resumed handle has the same result as a match from the start, without the pages before that
          handle.
        - `probe` and `probe_again` have the same result. They do not change recency, hits or structure.
        - `continuation` has no effects. The key followed by the result is a prefix of a key that was inserted in the
          namespace.
        - Until a pin expires, its prefix is evicted only if no unpinned leaf is left; the pin that expires first is
          evicted first. Pinned pages count as evictable.
        - Namespaces never share pages.
        - Replaying all events (see `CacheEvent`) gives the tree that `walk` returns.
        - `eviction_age_s`, if measured, is the time between the last use and the eviction of the most recently evicted
          node.

    With a `WindowView`, a match may end at a position only if the `reach_pages` pages before the position have window
    pages, or all pages if there are fewer. `insert` reads from the view whether a new page has a window page. If a
    cached page has no window page, but the page that is inserted for the same tokens has one, the cached page gets this
    window page: the caller moves it, and the cache updates its counts.

    With a `StateView`, a match ends at the last cached page at whose end a state is stored, or at the resumed handle,
    or is empty. `version` also increases with the view's version. `insert` and the other methods do not depend on it.
    """

    @abstractmethod
    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest cached prefix of a key.

        Args:
            key: the tokens; a trailing partial page is ignored.
            resume: a locked handle of a prefix of the key. The match starts at this handle, and does not visit the
                nodes before it again.

        Effects: updates recency in all nodes of the match, and counts a hit in the nodes after a resumed handle. It may
            split a node. It locks no node.
        """

    @abstractmethod
    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Insert the whole pages of a key.

        Args:
            key: the tokens; a trailing partial page is ignored.
            pages: int32 [p], page ids of the key's whole pages past `handle`:
                p = len(token_ids) // page_size - handle.num_pages.
            handle: handle of a prefix of the key; it is locked or is the result of the latest match.

        Effects: the cache becomes the owner of the pages between `existing_pages` and `cached_pages`, and copies their
            ids. It frees no page. Locks do not change: the caller locks the returned handle and unlocks the old handle.
        """

    @abstractmethod
    def lock(self, handle: PrefixHandle) -> None:
        """Protect the path to a handle from eviction until `unlock`."""

    @abstractmethod
    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`."""

    @abstractmethod
    def evict(self, num_pages: int) -> PageIds:
        """Evict leaves in strategy order: at least `num_pages` pages, or all evictable pages if there are fewer.

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
        """Time in seconds from last use to eviction of the latest evicted node; None before that, or if not measured.

        A short time shows that the memory is too small: content that is evicted seconds after its last use might have
        been reused.
        """
        return None

    @property
    def state_interval_tokens(self) -> int | None:
        """Maximum distance in tokens between the states that are stored within a prompt; None: there is no maximum.

        Only read from a cache with the capability `state`. In any case, a state is stored at the last page end of a
        prompt, and where the prompt leaves the cached prefixes.
        """
        return None

    @abstractmethod
    def walk(self) -> Iterator[NodeView]:
        """Yield every node, parents before children."""

    @property
    @abstractmethod
    def version(self) -> int:
        """A counter that increases whenever the result of a `probe` may have changed."""

    @abstractmethod
    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match would find, without effects. Called for waiting requests."""

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Probe from the end of the last probe of the same key.

        The scheduler calls this method for every waiting request after each change of `version`. It should therefore
        take O(1) if the cache did not change at `place`. The default implementation probes from the start.

        Args:
            key: the tokens.
            place: the result of the last call with the same key; None in the first call.

        Returns: the end of a match; None if no page of the key is cached.
        """
        num_pages = self.probe(key)
        return _Probed(num_pages) if num_pages else None

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return tokens that follow a key in the cache, without effects. Called for speculative decoding.

        Args:
            key: the tokens; they need not be whole pages.
            num_tokens: maximum number of tokens to return.

        Returns: int32 [m], tokens that were inserted after exactly this key in its namespace. If the key has several
            continuations, the most recently used one is returned. The array is empty if the key is not cached to its
            end, or if no token follows. The default implementation returns an empty array.
        """
        return _NO_TOKENS

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Pin the cached part of a key for `ttl_s` seconds, so that it is evicted last.

        Effects: updates recency like a match, but counts no hit. Pinning the same key again restarts the time.

        Returns: number of pinned pages; 0 if no page of the key is cached, this cache does not support pins, or the
            limit of pins is reached.
        """
        return 0

    def unpin(self, key: PrefixKey) -> bool:
        """Remove the pin of a key before it expires. Return whether exactly this key was pinned."""
        return False

    # The methods below are called only for a cache with the capability `window` and a `WindowView`.

    @property
    def evictable_window_pages(self) -> int:
        """Number of window pages that `evict_window` could free now. O(1)."""
        return 0

    def lock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Protect the window pages of the last `num_pages` pages before a locked handle from eviction.

        The protection ends with `unlock_window`. `lock` protects only the pages, not their window pages.
        """

    def unlock_window(self, handle: PrefixHandle, num_pages: int) -> None:
        """Undo one `lock_window` with the same arguments. The handle must still be locked."""

    def evict_window(self, num_pages: int) -> WindowEviction:
        """Evict at least `num_pages` unlocked window pages, or all unlocked window pages if there are fewer.

        A page may lose its window page and stay in the cache. Full-attention layers still use such a page, for prompts
        whose cached prefix continues for more than a window after it.
        """
        return WindowEviction(NO_PAGES, NO_PAGES)
