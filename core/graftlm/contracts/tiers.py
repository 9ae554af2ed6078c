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
    """Pages in lower tiers that follow a key's match. The tiers do not evict them before `load` or `decline`."""

    @property
    def num_pages(self) -> int:
        """Number of pages that `load` fills; at least one."""
        ...


class PrefetchTicket(Protocol):
    """A prefetch from storage to host memory for one waiting request."""

    @property
    def done(self) -> bool:
        """Whether the prefetch is complete."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """Clock reading after which the request no longer waits for the prefetch; None: it waits without a limit."""
        ...

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback`, from any thread, when the prefetch is complete, or immediately if it is already complete."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """Numbers of loaded pages by tier. `storage` is the number of prefetched pages that are used for the first time."""

    host: int = 0
    storage: int = 0


class TieredPrefixCache(PrefixCache):
    """A prefix cache that also stores the content of pages in lower tiers, and loads it back.

    Invariants:
        - All invariants of `PrefixCache` hold; its methods concern only the device tier.
        - `load` restores the content of pages that were passed to `store` for exactly these tokens, in the same
          namespace and with the same model; other content is not offered. Loading an offer does not fail.
        - Before `evict` returns pages, it queues copies of the content that lower tiers must keep.
        - Lower tiers may lose any content at any time, except offered pages. Methods do not raise because of lost
          content.
        - One thread calls all methods, and no method waits for storage.
    """

    @abstractmethod
    def store(self, key: PrefixKey, pages: PageIds) -> None:
        """Let lower tiers store the pages of a key. A cache may copy the pages now or when they are evicted.

        Args:
            key: the tokens, in whole pages.
            pages: int32 [len(key) // page_size], the device tier's pages from the start of the key. They are written by
                steps that were planned before, or by the step that is being planned.
        """

    @abstractmethod
    def find(self, key: PrefixKey, num_pages: int) -> LoadOffer | None:
        """Return an offer of pages in host memory that follow a key's first `num_pages` pages; None without such pages.

        The method is called once per admitted request, so a cache may count uses in it.
        """

    @abstractmethod
    def load(self, offer: LoadOffer, pages: PageIds) -> LoadedPages:
        """Load an offer to `pages`, int32 [offer.num_pages], before the step that is being planned reads them."""

    @abstractmethod
    def decline(self, offer: LoadOffer) -> None:
        """Release an offer without loading it."""

    @abstractmethod
    def prefetch(self, key: PrefixKey) -> PrefetchTicket | None:
        """Start to prefetch a key's blocks from storage to host memory; return None if there is nothing to prefetch."""

    @abstractmethod
    def release(self, ticket: PrefetchTicket) -> None:
        """Stop a prefetch whose request was admitted or has ended, and allow the eviction of its blocks."""

    @abstractmethod
    def copied(self, copies: StepCopies) -> None:
        """Handle the completion of queued copies."""

    @abstractmethod
    def copies_lost(self, copies: StepCopies) -> None:
        """Handle the failure of queued copies. The content of their targets is undefined."""

    @abstractmethod
    def flush(self) -> None:
        """Queue copies of all content on the device that lower tiers should have after the engine ends."""

    @property
    @abstractmethod
    def tier_stats(self) -> TierStats:
        """The counters of the lower tiers."""

    @abstractmethod
    def close(self) -> None:
        """Finish writes to storage, and release the storage. No other method is called afterwards.

        Effects: waits until all blocks are written, or until the storage makes no progress.
        """

    def abandon(self) -> None:
        """Release host memory and storage immediately. Called instead of `close` after the cache or its user failed.

        Effects: a new cache with the same amount of host memory may be created afterwards. The method runs in a
            separate thread, and the caller waits only briefly.
        """
        self.close()
