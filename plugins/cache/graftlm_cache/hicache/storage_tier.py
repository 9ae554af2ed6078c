"""The blocks in storage, read and written in threads beside the scheduler."""

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

#: Of the host blocks, at most this share waits to be written, and at most this share is held for waiting requests.
_MAX_SHARE = 0.5
#: How long storage may take over one block while the engine waits for it to end.
_PATIENCE_S = 10.0
#: Likewise while the engine waits to go on.
_MOMENT_S = 0.5
#: The exponent bits of a number, all of which are set in one that is not finite.
_EXPONENTS = {"float32": ("<u4", 0x7F80_0000), "float16": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80)}


@dataclass(slots=True, eq=False)
class Prefetch:
    """Blocks on their way from storage to host memory, for one request; implements `PrefetchTicket`.

    Attributes:
        blocks: that are pinned for it so far. Only its reader adds to them until it is done.
        is_released: nobody waits for it any more.
        is_over: its reader is through. Like `is_released`, read and set under the tier's lock: whichever comes second
            unpins the blocks.
    """

    deadline_s: float | None
    blocks: list[HostBlock] = field(default_factory=list)
    is_released: bool = False
    is_over: bool = False
    ended: "Future[None]" = field(default_factory=Future)

    @property
    def done(self) -> bool:
        """Whether nothing further comes."""
        return self.ended.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, when this is done; at once if it is."""
        self.ended.add_done_callback(lambda _: callback())


class StorageTier:
    """Brings blocks from storage to host memory and back, one thread each way.

    Whatever the storage does costs speed only: what it raises is counted and logged, what it reads slowly is computed
    instead, what it writes slowly is not written, and one that hangs is left alone.

    Args:
        dtype: of the numbers in blocks; those with one that is not finite are not written.
        patience_s: how long `close` waits while no block gets done.

    Attributes:
        num_prefetched: blocks brought to host memory.
        num_skipped: blocks not written.
    """

    def __init__(self, storage: KVStorage, host: HostTier, dtype: str, patience_s: float = _PATIENCE_S) -> None:
        self.num_prefetched = 0
        self.num_skipped = 0
        self._storage = storage
        self._host = host
        self._dtype = dtype
        self._patience_s = patience_s
        self._limit = max(1, int(host.num_slots * _MAX_SHARE))
        self._max_writing = self._limit
        self._lock = threading.Lock()
        self._num_writing = 0
        self._num_held = 0
        self._num_raised = 0
        self._is_closing = False  # nothing more is read
        self._is_given_up = False  # nor written
        self._reader = Worker("graftlm-kv-read")
        self._writer = Worker("graftlm-kv-write")

    # -- To storage -----------------------------------------------------------------------------------------------

    def write(self, block: HostBlock) -> None:
        """Write a filled block some time soon, or skip it when too many wait."""
        with self._lock:
            if self._num_writing >= self._max_writing:
                self.num_skipped += 1
                return
            self._num_writing += 1
        self._host.pin(block)
        self._writer.submit(partial(self._write, block))

    def write_everything(self) -> None:
        """Skip no block from now on, however many wait: host memory is not needed for anything else any more."""
        self._max_writing = self._host.num_slots

    def _write(self, block: HostBlock) -> None:
        try:
            if self._is_given_up or block.is_doomed or not is_finite(self._host.memory[block.slot], self._dtype):
                self.num_skipped += 1
            else:
                self._storage.put(block.key, self._host.memory[block.slot])
        except Exception:
            self._note_failure("writing")
        finally:
            self._host.unpin(block)
            with self._lock:
                self._num_writing -= 1

    # -- From storage ---------------------------------------------------------------------------------------------

    def prefetch(self, keys: Sequence[bytes], deadline_s: float | None) -> Prefetch:
        """Begin to bring the blocks of a sequence to host memory, as many as storage has from the front on."""
        prefetch = Prefetch(deadline_s)
        if self._is_closing:
            prefetch.is_over = True
            prefetch.ended.set_result(None)
        else:
            self._reader.submit(partial(self._read, prefetch, tuple(keys)))
        return prefetch

    def release(self, prefetch: Prefetch) -> None:
        """Stop it, and let its blocks be evicted."""
        with self._lock:
            prefetch.is_released = True
            if prefetch.is_over:
                self._unpin(prefetch)

    def _read(self, prefetch: Prefetch, keys: Sequence[bytes]) -> None:
        try:
            num_here = self._host.num_known(keys)
            absent = keys[num_here:]
            num_stored = self._storage.contains(absent) if absent and not self._is_closing else 0
            for key in keys[: num_here + num_stored]:
                if not self._fetch(prefetch, key):
                    break
        except Exception:
            self._note_failure("reading")
        finally:
            with self._lock:
                prefetch.is_over = True
                if prefetch.is_released:
                    self._unpin(prefetch)
            prefetch.ended.set_result(None)

    def _fetch(self, prefetch: Prefetch, key: bytes) -> bool:
        """Bring one block; returns whether to go on."""
        with self._lock:
            if prefetch.is_released or self._is_closing or self._num_held >= self._limit:
                return False
        held = self._host.take([key]) or self._read_block(key)
        prefetch.blocks += held
        with self._lock:
            self._num_held += len(held)
        return bool(held)

    def _read_block(self, key: bytes) -> list[HostBlock]:
        """Return the block, filled from storage and pinned; nothing when it is not there, or there is no room."""
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
        """Return the storage's counts; what it raised counts as failures."""
        stats = self._storage.stats()
        return replace(stats, failures=stats.failures + self._num_raised)

    def close(self) -> None:
        """Stop reading, finish writing, and let go of the storage; leave it alone once no block gets done any more."""
        self._is_closing = True
        ending = self._begin_end()
        while ending.is_alive():
            num_done = self._reader.num_done + self._writer.num_done
            ending.join(self._patience_s)
            if ending.is_alive() and num_done == self._reader.num_done + self._writer.num_done:
                self._is_given_up = True
                logger.error(
                    "KV storage has done nothing for %g s: it is left alone, and %d blocks are not written",
                    self._patience_s,
                    self._num_writing,
                )
                return

    def abandon(self) -> None:
        """Stop reading and writing, and let go of the storage as soon as it returns; wait a moment for that."""
        self._is_closing = self._is_given_up = True
        self._begin_end().join(_MOMENT_S)

    def _begin_end(self) -> threading.Thread:
        """End both threads and then let go of the storage, beside the caller; returns the thread that does."""
        ending = threading.Thread(target=self._end, name="graftlm-kv-end", daemon=True)
        ending.start()
        return ending

    def _end(self) -> None:
        self._reader.end()
        self._writer.end()
        try:
            self._storage.close()
        except Exception:
            logger.exception("a KV storage did not close")

    def _note_failure(self, doing: str) -> None:
        with self._lock:
            self._num_raised += 1
            is_first = self._num_raised == 1
        if is_first:
            logger.exception("%s KV blocks failed; storage should count such failures, not raise them", doing)


def is_finite(data: NDArray[np.uint8], dtype: str) -> bool:
    """Return whether every number in a block's bytes is finite."""
    if dtype not in _EXPONENTS:
        return True
    integer, mask = _EXPONENTS[dtype]
    return not ((data.view(integer) & mask) == mask).any()
