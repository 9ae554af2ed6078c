"""The storage tier: reads and writes blocks in separate threads."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import KVStorage, StorageStats
from graftlm_cache.hicache.host_tier import HostBlock, HostTier
from graftlm_cache.hicache.worker import Worker

__all__ = ["Prefetch", "StorageTier"]

logger = logging.getLogger(__name__)

#: Maximum share of the host blocks that may wait to be written; also the maximum share that prefetches may pin.
_MAX_SHARE = 0.5
#: `close` stops waiting if storage finishes no block for this time, in seconds.
_CLOSE_TIMEOUT_S = 10.0
#: Maximum time that `abandon` waits, in seconds.
_ABANDON_TIMEOUT_S = 0.5
#: Unsigned type and exponent bits of each dtype; a number is not finite if all its exponent bits are set.
_EXPONENTS = {"float32": ("<u4", 0x7F80_0000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}


@dataclass(slots=True, eq=False)
class Prefetch:
    """The prefetch of one request's blocks from storage to host memory; implements `PrefetchTicket`.

    Attributes:
        deadline_s: clock reading until which the request waits; None: it waits until the prefetch is done.
        blocks: the blocks that the prefetch has pinned so far. Only the reader thread adds blocks.
        is_released: whether the request no longer waits for the prefetch. Guarded by the tier's lock.
        is_over: whether the reader thread has finished the prefetch. Guarded by the tier's lock. The blocks are
            unpinned when both `is_released` and `is_over` are set.
        ended: completed when the prefetch is done.
    """

    deadline_s: float | None
    blocks: list[HostBlock] = field(default_factory=list)
    is_released: bool = False
    is_over: bool = False
    ended: "Future[None]" = field(default_factory=Future)

    @property
    def done(self) -> bool:
        """Whether the prefetch has ended, so that no more blocks will be loaded."""
        return self.ended.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` from any thread when the prefetch is done; immediately if it is done already."""
        self.ended.add_done_callback(lambda _: callback())


class StorageTier:
    """Copies blocks from storage to host memory and back, with one thread for each direction.

    A slow or faulty storage costs only speed. Its exceptions are counted and logged. If it reads slowly, the tokens are
    computed instead. If it writes slowly, blocks are not written. If it hangs, it is abandoned.

    Args:
        storage: the KV storage.
        host: the host tier.
        dtype: dtype of the numbers in blocks; a block with a number that is not finite is not written.
        close_timeout_s: `close` stops waiting if no block is finished for this time, in seconds.

    Attributes:
        num_prefetched: number of blocks copied to host memory.
        num_skipped: number of blocks that were not written.
    """

    def __init__(
        self, storage: KVStorage, host: HostTier, dtype: str, close_timeout_s: float = _CLOSE_TIMEOUT_S
    ) -> None:
        self.num_prefetched = 0
        self.num_skipped = 0
        self._storage = storage
        self._host = host
        self._dtype = dtype
        self._close_timeout_s = close_timeout_s
        self._limit = max(1, int(host.num_slots * _MAX_SHARE))
        self._max_writing = self._limit
        self._lock = threading.Lock()
        self._num_writing = 0
        self._num_held = 0
        self._num_raised = 0
        self._is_closing = False  # no more blocks are read
        self._is_abandoned = False  # no more blocks are written
        self._reader = Worker("graftlm-kv-read")
        self._writer = Worker("graftlm-kv-write")

    # -- To storage -----------------------------------------------------------------------------------------------

    def write(self, block: HostBlock) -> None:
        """Queue a filled block for writing; skip the block if too many blocks are queued."""
        with self._lock:
            if self._num_writing >= self._max_writing:
                self.num_skipped += 1
                return
            self._num_writing += 1
        self._host.pin(block)
        self._writer.submit(partial(self._write, block))

    def write_everything(self) -> None:
        """From now on, queue every block, even if many blocks are queued. Called before the cache is closed."""
        self._max_writing = self._host.num_slots

    def _write(self, block: HostBlock) -> None:
        try:
            if self._is_abandoned or block.is_dropped or not is_finite(self._host.memory[block.slot], self._dtype):
                self.num_skipped += 1
            else:
                self._storage.put(block.key, self._host.memory[block.slot])
        except Exception:
            self._record_failure("writing")
        finally:
            self._host.unpin(block)
            with self._lock:
                self._num_writing -= 1

    # -- From storage ---------------------------------------------------------------------------------------------

    def prefetch(self, keys: Sequence[bytes], deadline_s: float | None) -> Prefetch:
        """Start copying a sequence's blocks to host memory, up to the first block that storage does not have.

        Args:
            keys: keys of the sequence's blocks.
            deadline_s: see `Prefetch`.
        """
        prefetch = Prefetch(deadline_s)
        if self._is_closing:
            prefetch.is_over = True
            prefetch.ended.set_result(None)
        else:
            self._reader.submit(partial(self._read, prefetch, tuple(keys)))
        return prefetch

    def release(self, prefetch: Prefetch) -> None:
        """Stop a prefetch, and make its blocks evictable."""
        with self._lock:
            prefetch.is_released = True
            if prefetch.is_over:
                self._unpin(prefetch)

    def _read(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        try:
            num_on_host = self._host.num_known(keys)
            absent = keys[num_on_host:]
            num_stored = self._storage.contains(absent) if absent and not self._is_closing else 0
            for key in keys[: num_on_host + num_stored]:
                if not self._fetch(prefetch, key):
                    break
        except Exception:
            self._record_failure("reading")
        finally:
            with self._lock:
                prefetch.is_over = True
                if prefetch.is_released:
                    self._unpin(prefetch)
            prefetch.ended.set_result(None)

    def _fetch(self, prefetch: Prefetch, key: bytes) -> bool:
        """Pin one block for the prefetch, and read it from storage if necessary. Return whether to continue."""
        with self._lock:
            if prefetch.is_released or self._is_closing or self._num_held >= self._limit:
                return False
        held = self._host.take([key]) or self._read_block(key)
        prefetch.blocks += held
        with self._lock:
            self._num_held += len(held)
        return bool(held)

    def _read_block(self, key: bytes) -> list[HostBlock]:
        """Read one block from storage. Return the pinned block, or an empty list if it is missing or has no room."""
        block = self._host.reserve(key)
        if block is None:
            return []
        is_read = False
        try:
            is_read = self._storage.get(key, self._host.memory[block.slot])
        finally:
            if is_read:
                block.from_storage = True
                is_read = self._host.fill(block)
            if not is_read:
                self._host.drop(block)
                self._host.unpin(block)
        self.num_prefetched += is_read
        return [block] if is_read else []

    def _unpin(self, prefetch: Prefetch) -> None:
        for block in prefetch.blocks:
            self._host.unpin(block)
        self._num_held -= len(prefetch.blocks)
        prefetch.blocks.clear()

    # -- Both -----------------------------------------------------------------------------------------------------

    def stats(self) -> StorageStats:
        """Return the storage's counts; its exceptions count as failures."""
        stats = self._storage.stats()
        return replace(stats, failures=stats.failures + self._num_raised)

    def close(self) -> None:
        """Stop reading, finish writing, and close the storage. Abandon it if it finishes no block for too long."""
        self._is_closing = True
        ending = self._begin_end()
        while ending.is_alive():
            num_done = self._reader.num_done + self._writer.num_done
            ending.join(self._close_timeout_s)
            if ending.is_alive() and num_done == self._reader.num_done + self._writer.num_done:
                self._is_abandoned = True
                logger.error(
                    "KV storage finished no block for %g s: it is abandoned, and %d blocks are not written",
                    self._close_timeout_s,
                    self._num_writing,
                )
                return

    def abandon(self) -> None:
        """Stop reading and writing, and close the storage when its last call returns; wait at most 0.5 s."""
        self._is_closing = self._is_abandoned = True
        self._begin_end().join(_ABANDON_TIMEOUT_S)

    def _begin_end(self) -> threading.Thread:
        """Start and return a thread that ends both workers and then closes the storage."""
        ending = threading.Thread(target=self._end, name="graftlm-kv-end", daemon=True)
        ending.start()
        return ending

    def _end(self) -> None:
        self._reader.end()
        self._writer.end()
        try:
            self._storage.close()
        except Exception:
            logger.exception("closing a KV storage failed")

    def _record_failure(self, action: str) -> None:
        """Count an exception of the storage; log the first one."""
        with self._lock:
            self._num_raised += 1
            is_first = self._num_raised == 1
        if is_first:
            logger.exception("%s KV blocks failed; a KV storage should count such failures, not raise them", action)


def is_finite(data: NDArray[np.uint8], dtype: str) -> bool:
    """Return whether every number in a block's bytes is finite."""
    if dtype not in _EXPONENTS:
        return True
    integer, mask = _EXPONENTS[dtype]
    return not ((data.view(integer) & mask) == mask).any()
