"""A prefix cache that stays empty, for an engine whose cache cannot be created again after a failure."""

from collections.abc import Iterator

from graftlm.contracts import (
    NO_PAGES,
    InsertResult,
    LoadedPages,
    LoadOffer,
    NodeView,
    PrefetchTicket,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    StepCopies,
    TieredPrefixCache,
)
from graftlm.errors import InvariantError
from graftlm.records import TierStats
from graftlm.types import PageIds

__all__ = ["NoCache"]


class _Root:
    """The only handle: the end of the empty prefix."""

    __slots__ = ()

    @property
    def num_pages(self) -> int:
        return 0


class NoCache(TieredPrefixCache):
    """A prefix cache that never contains pages.

    It replaces the previous cache after a failed restart of the KV memory. Usage, statistics and snapshots then show an
    empty memory; flushing and pinning have no effect.
    """

    def __init__(self) -> None:
        self._root = _Root()

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Return an empty match."""
        return PrefixMatch(self._root, NO_PAGES)

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Insert no page."""
        return InsertResult(existing_pages=0, cached_pages=0, handle=self._root, pages=NO_PAGES)

    def lock(self, handle: PrefixHandle) -> None:
        """Do nothing."""

    def unlock(self, handle: PrefixHandle) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> PageIds:
        """Return no page."""
        return NO_PAGES

    def reset(self) -> PageIds:
        """Return no page."""
        return NO_PAGES

    @property
    def evictable_pages(self) -> int:
        """Always 0."""
        return 0

    @property
    def locked_pages(self) -> int:
        """Always 0."""
        return 0

    def walk(self) -> Iterator[NodeView]:
        """Yield nothing."""
        return iter(())

    @property
    def version(self) -> int:
        """Always 0."""
        return 0

    def probe(self, key: PrefixKey) -> int:
        """Return 0."""
        return 0

    def store(self, key: PrefixKey, pages: PageIds) -> None:
        """Do nothing."""

    def find(self, key: PrefixKey, num_pages: int) -> LoadOffer | None:
        """Return None."""
        return None

    def load(self, offer: LoadOffer, pages: PageIds) -> LoadedPages:
        """Raise InvariantError: there is no offer to load."""
        raise InvariantError("a cache that offers nothing cannot load an offer")

    def decline(self, offer: LoadOffer) -> None:
        """Do nothing."""

    def prefetch(self, key: PrefixKey) -> PrefetchTicket | None:
        """Return None."""
        return None

    def release(self, ticket: PrefetchTicket) -> None:
        """Do nothing."""

    def copied(self, copies: StepCopies) -> None:
        """Do nothing."""

    def copies_lost(self, copies: StepCopies) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    @property
    def tier_stats(self) -> TierStats:
        """The counters, which are all zero."""
        return TierStats()

    def close(self) -> None:
        """Do nothing."""
