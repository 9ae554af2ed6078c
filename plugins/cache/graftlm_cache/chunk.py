"""A prefix cache that caches nothing: the baseline for comparisons, and a choice for prompts that never repeat."""

from collections.abc import Iterator

from graftlm.contracts import (
    NO_PAGES,
    CacheContext,
    InsertResult,
    NodeView,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
)
from graftlm.errors import InvariantError
from graftlm.types import PageIds

__all__ = ["ChunkCache"]


class _Start:
    """The handle of every match: the start of the prompt."""

    __slots__ = ("num_locks",)

    def __init__(self) -> None:
        self.num_locks = 0

    @property
    def num_pages(self) -> int:
        return 0


class ChunkCache(PrefixCache):
    """Matches nothing and caches nothing: all pages stay owned by the requests that wrote them."""

    def __init__(self, context: CacheContext) -> None:
        self._start = _Start()

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Return an empty match."""
        return PrefixMatch(self._start, NO_PAGES)

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Cache nothing: the caller keeps all pages."""
        return InsertResult(existing_pages=0, cached_pages=0, handle=self._start, pages=NO_PAGES)

    def lock(self, handle: PrefixHandle) -> None:
        """Count a lock; it has no other effect."""
        self._start.num_locks += 1

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`.

        Raises:
            InvariantError: nothing is locked.
        """
        if self._start.num_locks == 0:
            raise InvariantError("chunk cache: unlock without a lock. Unlock a handle as often as it was locked.")
        self._start.num_locks -= 1

    def evict(self, num_pages: int) -> PageIds:
        """Return no pages."""
        return NO_PAGES

    def reset(self) -> PageIds:
        """Return no pages."""
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
        """Always 0: the result of `probe` never changes."""
        return 0

    def probe(self, key: PrefixKey) -> int:
        """Return 0."""
        return 0
