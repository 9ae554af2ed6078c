"""The hierarchical cache: a device cache with lower tiers, which are blocks in host memory and in storage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from graftlm.contracts import (
    BlockCopy,
    InsertResult,
    KVTransfer,
    LoadedPages,
    LoadOffer,
    NodeView,
    PrefetchTicket,
    PrefixCache,
    PrefixHandle,
    PrefixKey,
    PrefixMatch,
    ProbePlace,
    StepCopies,
    StorageStats,
    TieredPrefixCache,
)
from graftlm.errors import InvariantError
from graftlm.records import TierStats
from graftlm.types import PageIds, TokenIds
from graftlm_cache.hicache.block_keys import BlockKeys
from graftlm_cache.hicache.host_tier import HostBlock, HostTier
from graftlm_cache.hicache.residents import Residents
from graftlm_cache.hicache.storage_tier import Prefetch, StorageTier
from graftlm_cache.hicache.writing import WritePolicy

__all__ = ["HierarchicalCache"]


@dataclass(frozen=True, slots=True, eq=False)
class _Offer:
    """Pinned host blocks that continue a match.

    `find` returns it to the KV manager, which passes it to `load` or `decline`.

    Attributes:
        blocks: the blocks, in the order of the prompt.
        first_page: index, within the first block, of the first page to load.
        num_pages: number of pages to load.
    """

    blocks: list[HostBlock]
    first_page: int
    num_pages: int


class HierarchicalCache(TieredPrefixCache):
    """Combines a device cache with lower tiers, which are maps from content hashes to blocks.

        device    any prefix cache   pages in a tree      matched, locked and evicted as without lower tiers
        host      HostTier           blocks by hash       filled with copies from the device and from storage
        storage   StorageTier        blocks by hash       written from host memory, prefetched into host memory

    A lower tier needs no tree, because a block's hash depends on all tokens up to the block's end. The longest prefix
    in a tier is found by looking up a request's hashes in order, and the tier may lose any block at any time.

    Args:
        device: the prefix cache of the device tier; all methods of `PrefixCache` are forwarded to it.
        host: the second tier.
        storage: the third tier, or None.
        transfer: copies pages and blocks; None if `host` has no slots.
        writing: decides which blocks are copied to the host, and when.
        wait_s: maximum time that a request waits for its prefetch from storage, in seconds from the prefetch's start;
            None: it waits until the prefetch is complete.
        page_size: number of tokens in a page.
        block_tokens: number of tokens in a block, a multiple of `page_size`.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        device: PrefixCache,
        host: HostTier,
        storage: StorageTier | None,
        transfer: KVTransfer | None,
        writing: WritePolicy,
        *,
        wait_s: float | None,
        page_size: int,
        block_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._device = device
        self._host = host
        self._storage = storage
        self._queue = transfer
        self._writing = writing
        self._wait_s = wait_s
        self._page_size = page_size
        self._block_tokens = block_tokens
        self._block_pages = block_tokens // page_size
        self._clock = clock
        self._keys = BlockKeys(block_tokens)
        self._residents = Residents()
        self._num_stored = self._num_loaded = self._num_skipped = self._num_lost = self._num_late = 0

    # -- The device tier ------------------------------------------------------------------------------------------

    def match(self, key: PrefixKey, resume: PrefixHandle | None = None) -> PrefixMatch:
        """Find the longest prefix on the device; see `PrefixCache.match`."""
        return self._device.match(key, resume)

    def insert(self, key: PrefixKey, pages: PageIds, handle: PrefixHandle) -> InsertResult:
        """Insert pages on the device; see `PrefixCache.insert`."""
        return self._device.insert(key, pages, handle)

    def lock(self, handle: PrefixHandle) -> None:
        """Protect a path on the device from eviction until `unlock`."""
        self._device.lock(handle)

    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one `lock`."""
        self._device.unlock(handle)

    def evict(self, num_pages: int) -> PageIds:
        """Evict pages of the device. With `write_back`, their blocks are copied to the host before being overwritten.

        Returns: int32, the evicted page ids.
        """
        pages = self._device.evict(num_pages)
        if self._queue is not None:
            self._queue.hurry(pages)
            for key, block_pages in self._residents.take(pages):
                self._copy_to_host(key, block_pages, self._queue.store_now)
        return pages

    def reset(self) -> PageIds:
        """Remove all nodes on the device that are not locked, and all host blocks. Storage does not change.

        Returns: int32, the removed page ids.
        """
        pages = self._device.reset()
        self._residents.take(pages)
        self._host.clear()
        return pages

    @property
    def evictable_pages(self) -> int:
        """Number of pages that `evict` could return now."""
        return self._device.evictable_pages

    @property
    def locked_pages(self) -> int:
        """Number of pages on locked paths."""
        return self._device.locked_pages

    @property
    def eviction_age_s(self) -> float | None:
        """Seconds between last use and eviction of the node that the device evicted last."""
        return self._device.eviction_age_s

    def walk(self) -> Iterator[NodeView]:
        """Yield every node on the device."""
        return self._device.walk()

    @property
    def version(self) -> int:
        """A number that increases whenever pages on the device are added or removed."""
        return self._device.version

    def probe(self, key: PrefixKey) -> int:
        """Return the number of pages that a match on the device would find."""
        return self._device.probe(key)

    def probe_again(self, key: PrefixKey, place: ProbePlace | None) -> ProbePlace | None:
        """Probe from the end of the last probe of this key; see `PrefixCache.probe_again`."""
        return self._device.probe_again(key, place)

    def continuation(self, key: PrefixKey, num_tokens: int) -> TokenIds:
        """Return tokens that follow a key in the device tier; see `PrefixCache.continuation`."""
        return self._device.continuation(key, num_tokens)

    def pin(self, key: PrefixKey, ttl_s: float) -> int:
        """Pin a prefix on the device for `ttl_s` seconds; see `PrefixCache.pin`."""
        return self._device.pin(key, ttl_s)

    def unpin(self, key: PrefixKey) -> bool:
        """End a pin early; see `PrefixCache.unpin`."""
        return self._device.unpin(key)

    # -- Device to host -------------------------------------------------------------------------------------------

    def store(self, key: PrefixKey, pages: PageIds) -> None:
        """Queue copies to the host of those blocks that the write policy selects; see `TieredPrefixCache.store`."""
        keys = self._keys.of(key)[: self._host.num_slots]
        if self._queue is None or not keys:
            return
        self._host.touch(keys)  # before copying, so that no block of this key is evicted to make room for the copies
        num_new = 0
        for i, block_key in enumerate(keys):
            if block_key in self._host:
                continue
            block_pages = pages[i * self._block_pages : (i + 1) * self._block_pages]
            if self._writing.copies_now(block_key):
                num_new += self._copy_to_host(block_key, block_pages, self._queue.store)
            elif self._writing.on_eviction:
                self._residents.add(block_key, block_pages)
        if num_new:
            self._host.touch(keys)

    def _copy_to_host(self, key: bytes, pages: PageIds, queue: Callable[[BlockCopy], None]) -> bool:
        """Queue a copy of a block, unless the host has it already or has no room. Return whether it was queued."""
        block = self._host.reserve(key)
        if block is None:
            self._num_skipped += key not in self._host
            return False
        queue(BlockCopy(block.slot, 0, pages.copy()))
        return True

    def copied(self, copies: StepCopies) -> None:
        """Make blocks that were copied to the host available, and start writing them to storage."""
        for copy in (*copies.early_stores, *copies.stores):
            block = self._host.at(copy.slot)
            if self._host.fill(block):
                self._num_stored += 1
                if self._storage is not None:
                    self._storage.write(block)
            self._host.unpin(block)
        for copy in (*copies.early_loads, *copies.loads):
            self._host.unpin(self._host.at(copy.slot))
            self._num_loaded += 1

    def copies_lost(self, copies: StepCopies) -> None:
        """Drop the host blocks of copies that were not made, and unpin the blocks of copies to the device."""
        for copy in (*copies.early_stores, *copies.stores):
            block = self._host.at(copy.slot)
            self._host.drop(block)
            self._host.unpin(block)
            self._num_lost += 1
        for copy in (*copies.early_loads, *copies.loads):
            self._host.unpin(self._host.at(copy.slot))
            self._num_lost += 1

    def flush(self) -> None:
        """If there is a storage, queue copies to the host for all blocks that would be copied at their eviction."""
        if self._storage is None or self._queue is None:
            return
        self._storage.write_everything()
        for key, pages in self._residents:
            self._copy_to_host(key, pages, self._queue.store)

    # -- Host to device -------------------------------------------------------------------------------------------

    def find(self, key: PrefixKey, num_pages: int) -> LoadOffer | None:
        """Return the filled host blocks that continue a match; see `TieredPrefixCache.find`."""
        keys = self._keys.of(key)
        self._writing.used(keys)
        self._host.touch(keys)
        first_block, first_page = divmod(num_pages, self._block_pages)
        blocks = self._host.take(keys[first_block:])
        return _Offer(blocks, first_page, len(blocks) * self._block_pages - first_page) if blocks else None

    def load(self, offer: LoadOffer, pages: PageIds) -> LoadedPages:
        """Queue copies of the offered blocks into pages; see `TieredPrefixCache.load`."""
        offer, queue = self._own(offer), self._transfer
        num_loaded = {True: 0, False: 0}  # whether pages come from storage -> number of pages
        at, first_page = 0, offer.first_page
        for block in offer.blocks:
            num_pages = self._block_pages - first_page
            queue.load(BlockCopy(block.slot, first_page, pages[at : at + num_pages].copy()))
            num_loaded[block.from_storage] += num_pages
            block.from_storage = False
            at, first_page = at + num_pages, 0
        return LoadedPages(host=num_loaded[False], storage=num_loaded[True])

    def decline(self, offer: LoadOffer) -> None:
        """Unpin the offered blocks."""
        for block in self._own(offer).blocks:
            self._host.unpin(block)

    # -- Storage to host ------------------------------------------------------------------------------------------

    def prefetch(self, key: PrefixKey) -> PrefetchTicket | None:
        """Start a prefetch of a key's blocks from storage to the host; see `TieredPrefixCache.prefetch`."""
        if self._storage is None:
            return None
        num_on_device = self._device.probe(key) // self._block_pages
        keys = self._keys.of(key)[num_on_device:]
        if self._host.num_known(keys) == len(keys):
            return None
        deadline_s = None if self._wait_s is None else self._clock() + self._wait_s
        return self._storage.prefetch(keys, deadline_s)

    def release(self, ticket: PrefetchTicket) -> None:
        """Stop a prefetch, and make its blocks evictable.

        Raises:
            InvariantError: the ticket is not from this cache.
        """
        if self._storage is None or not isinstance(ticket, Prefetch):
            raise InvariantError(
                f"hicache: got a ticket of type {type(ticket).__name__}, expected one that `prefetch` returned."
            )
        self._num_late += not ticket.done
        self._storage.release(ticket)

    # -- Reading --------------------------------------------------------------------------------------------------

    @property
    def tier_stats(self) -> TierStats:
        """Return counts of the lower tiers."""
        storage = self._storage
        held = StorageStats() if storage is None else storage.stats()
        return TierStats(
            block_tokens=self._block_tokens,
            host_blocks=self._host.num_slots,
            host_used_blocks=len(self._host),
            stored_blocks=self._num_stored,
            loaded_blocks=self._num_loaded,
            evicted_blocks=self._host.num_evicted,
            skipped_stores=self._num_skipped,
            lost_copies=self._num_lost,
            prefetched_blocks=0 if storage is None else storage.num_prefetched,
            late_prefetches=self._num_late,
            skipped_writes=0 if storage is None else storage.num_skipped,
            storage_blocks=held.num_blocks,
            storage_bytes=held.num_bytes,
            storage_hits=held.hits,
            storage_misses=held.misses,
            storage_stored=held.stored,
            storage_evicted=held.evicted,
            storage_corrupt=held.corrupt,
            storage_foreign=held.foreign,
            storage_failures=held.failures,
        )

    def close(self) -> None:
        """Finish the writes to storage, and close the storage."""
        if self._storage is not None:
            self._storage.close()

    def abandon(self) -> None:
        """Release storage and host memory without finishing any transfer."""
        if self._storage is not None:
            self._storage.abandon()
        self._host.free_memory()

    @property
    def _transfer(self) -> KVTransfer:
        if self._queue is None:
            raise InvariantError("hicache: load was called on a cache without a transfer.")
        return self._queue

    def _own(self, offer: LoadOffer) -> _Offer:
        if not isinstance(offer, _Offer):
            raise InvariantError(
                f"hicache: got an offer of type {type(offer).__name__}, expected one that `find` returned."
            )
        return offer
