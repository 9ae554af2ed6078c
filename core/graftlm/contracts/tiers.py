"""The contract of a prefix cache with two tiers below the device's memory: host memory and storage.

device    |== matched ==|
host      |=============|== found: loaded into the request's pages, then inserted ==|
storage   |=========================================================================|== prefetched to host ==|
                                                                        while the request waits in the queue
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from graftlm.contracts.prefix_cache import PrefixCache, PrefixKey
from graftlm.contracts.transfer import StepCopies
from graftlm.records import TierStats
from graftlm.types import PageIds

__all__ = ["LoadOffer", "LoadedPages", "PrefetchTicket", "TieredPrefixCache"]


class LoadOffer(Protocol):
    """Pages of a key that follow its match and are in lower tiers. The tiers keep them until `load` or `decline`."""

    @property
    def num_pages(self) -> int:
        """Number of pages that `load` would fill; at least one."""
        ...


class PrefetchTicket(Protocol):
    """A prefetch from storage to host memory for one waiting request."""

    @property
    def done(self) -> bool:
        """Whether the prefetch is complete."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """Clock reading after which the request no longer waits; None: it waits until the prefetch is complete."""
        ...

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` from any thread when the prefetch is complete; immediately if it already is."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """Numbers of loaded pages by source. `storage` counts the prefetched pages that are used for the first time."""

    host: int = 0
    storage: int = 0


class TieredPrefixCache(PrefixCache):
    """A prefix cache that also stores the content of pages in lower tiers, and can load it back.

    Invariants:
        - The methods of `PrefixCache` concern the device tier only, and all invariants of `PrefixCache` hold.
        - `load` restores the content of pages that were passed to `store` for exactly these tokens, in the same
          namespace, with the same model; anything else is a miss. Loading an offer never fails.
        - Before `evict` returns pages, it queues copies of the content that lower tiers must keep.
        - Lower tiers may lose any content at any time, except offered pages; no method raises for this reason.
        - One thread calls all methods, and no method waits for storage.
    """

    @abstractmethod
    def store(self, key: PrefixKey, pages: PageIds) -> None:
        """Register pages of a key for lower tiers; a cache may copy them now or on eviction.

        Args:
            key: the tokens, whole pages.
            pages: int32 [len(key) // page_size], the device tier's pages from the start of the key. They are written by
                steps that were planned before, or by the step that is being planned.
        """

    @abstractmethod
    def find(self, key: PrefixKey, num_pages: int) -> LoadOffer | None:
        """Return an offer of the pages in host memory that follow a key's first `num_pages` pages; None if none do.

        This method is called once per admitted request, so caches may count uses in it.
        """

    @abstractmethod
    def load(self, offer: LoadOffer, pages: PageIds) -> LoadedPages:
        """Load the offer to `pages`, int32 [offer.num_pages], in time for the step that is being planned."""

    @abstractmethod
    def decline(self, offer: LoadOffer) -> None:
        """Release an offer without loading it."""

    @abstractmethod
    def prefetch(self, key: PrefixKey) -> PrefetchTicket | None:
        """Start to prefetch a key's blocks from storage to host memory; None if there is nothing to prefetch."""

    @abstractmethod
    def release(self, ticket: PrefetchTicket) -> None:
        """Stop a prefetch whose request was admitted or has ended, and allow the eviction of its blocks."""

    @abstractmethod
    def copied(self, copies: StepCopies) -> None:
        """Handle the completion of copies that were queued before."""

    @abstractmethod
    def copies_lost(self, copies: StepCopies) -> None:
        """Handle the failure of copies that were queued before. The content of their targets is undefined."""

    @abstractmethod
    def flush(self) -> None:
        """Queue copies of all device content that lower tiers should keep after the engine ends."""

    @property
    @abstractmethod
    def tier_stats(self) -> TierStats:
        """The counters of the lower tiers."""

    @abstractmethod
    def close(self) -> None:
        """Finish writes to storage and release it. No other method is called afterwards.

        Effects: returns when all blocks are written, or when a storage makes no progress.
        """

    def abandon(self) -> None:
        """Release host memory and storage immediately; called instead of `close` after the cache or its user failed.

        Effects: a new cache with the same amount of host memory may be created afterwards. The method runs in a
            separate thread, and the caller waits only briefly.
        """
        self.close()
