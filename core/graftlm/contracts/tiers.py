"""The contract of a prefix cache with tiers below the device's memory: host memory, and storage.

device    |== matched ==|
host      |=============|== found: loaded into pages of its own, then published ==|
storage   |=======================================================================|== prefetched to host ==|
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
    """What lower tiers hold of a key past its match; theirs to keep until `load` or `decline`."""

    @property
    def num_pages(self) -> int:
        """Pages that `load` would fill; at least one."""
        ...


class PrefetchTicket(Protocol):
    """What is being brought from storage to host memory for one waiting request."""

    @property
    def done(self) -> bool:
        """Whether nothing further comes."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """Clock reading from which on the request is not to wait; None: it waits until this is done."""
        ...

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, when this is done; at once if it is."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """Pages by where their content came from: `storage` ones were prefetched and are used for the first time."""

    host: int = 0
    storage: int = 0


class TieredPrefixCache(PrefixCache):
    """A prefix cache that keeps content of pages in lower tiers too, and can bring it back.

    Invariants:
        - As a `PrefixCache`, it is its device tier alone: every sentence there holds unchanged.
        - What `load` brings is what the pages held that were given to `store` for exactly these tokens, in that
          namespace, under the same model; anything else is a miss. An offer never fails.
        - `evict` queues copies of content that has to be kept before it gives the pages up.
        - Lower tiers may lose anything at any time but what is offered; no method raises for it.
        - Methods are called by one thread, and none waits for storage.
    """

    @abstractmethod
    def store(self, key: PrefixKey, pages: PageIds) -> None:
        """Take note of pages that the device tier holds for a key; a cache may copy them down, now or when they go.

        Args:
            key: the tokens, whole pages.
            pages: int32 [len(key) // page_size], from the start of the key; written by steps planned so far, or by the
                one that is being planned.
        """

    @abstractmethod
    def find(self, key: PrefixKey, num_pages: int) -> LoadOffer | None:
        """Return what host memory holds of a key after its first `num_pages` pages, or None.

        It is called once for every request that is admitted, so caches may count uses here.
        """

    @abstractmethod
    def load(self, offer: LoadOffer, pages: PageIds) -> LoadedPages:
        """Fill pages, int32 [offer.num_pages], with what was offered, in time for the step being planned."""

    @abstractmethod
    def decline(self, offer: LoadOffer) -> None:
        """Let an offer go."""

    @abstractmethod
    def prefetch(self, key: PrefixKey) -> PrefetchTicket | None:
        """Begin to bring what storage holds of a key to host memory; None when there is nothing to bring."""

    @abstractmethod
    def release(self, ticket: PrefetchTicket) -> None:
        """The ticket's request was admitted, or is gone: stop, and let its blocks be evicted."""

    @abstractmethod
    def copied(self, copies: StepCopies) -> None:
        """Copies queued before have been made."""

    @abstractmethod
    def copies_lost(self, copies: StepCopies) -> None:
        """Copies queued before were not made, or cannot be trusted."""

    @abstractmethod
    def flush(self) -> None:
        """Queue copies of everything on the device that a lower tier should have when the engine ends."""

    @property
    @abstractmethod
    def tier_stats(self) -> TierStats:
        """Counts of the lower tiers."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is being written to storage, and let go of it. No other method is called after it.

        Effects: it may take as long as blocks get written; a storage that hangs is left alone.
        """

    def abandon(self) -> None:
        """Let go of host memory and of storage at once, instead of `close`: this cache, or what uses it, has failed.

        Effects: another cache may be made after it, which needs as much host memory. It is called in a thread of its
            own, and waited for only a moment.
        """
        self.close()
