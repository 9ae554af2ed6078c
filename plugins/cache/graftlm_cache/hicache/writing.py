"""The policies that decide when a block on the device is copied to host memory."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from graftlm_cache.hicache.options import HicacheOptions

__all__ = ["WritePolicy", "write_policy"]


class WritePolicy(ABC):
    """Decides for each block when it is copied to host memory.

    Attributes:
        on_eviction: whether blocks without a copy are copied when they are evicted.
    """

    on_eviction: bool = False

    def used(self, keys: Sequence[bytes]) -> None:
        """Record that a request uses these blocks."""
        return

    @abstractmethod
    def copies_now(self, key: bytes) -> bool:
        """Return whether a computed block is copied now."""


class _WriteThrough(WritePolicy):
    def copies_now(self, key: bytes) -> bool:
        """Return True: every block is copied."""
        return True


class _WriteThroughSelective(WritePolicy):
    """Copies a block after `min_uses` requests have used it; counts uses of the `max_counted` most recent blocks."""

    def __init__(self, min_uses: int, max_counted: int) -> None:
        self._min_uses = min_uses
        self._max_counted = max_counted
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def used(self, keys: Sequence[bytes]) -> None:
        """Count one use of each block."""
        for key in reversed(keys):
            self._uses[key] = self._uses.pop(key, 0) + 1
        while len(self._uses) > self._max_counted:
            self._uses.popitem(last=False)

    def copies_now(self, key: bytes) -> bool:
        """Return whether enough requests have used the block."""
        return self._uses.get(key, 0) >= self._min_uses


class _WriteBack(WritePolicy):
    on_eviction = True

    def copies_now(self, key: bytes) -> bool:
        """Return False: blocks are copied only when they are evicted."""
        return False


def write_policy(options: HicacheOptions, num_host_blocks: int) -> WritePolicy:
    """Return the policy that `options.write_policy` names.

    Args:
        options: see `HicacheOptions`.
        num_host_blocks: number of blocks in host memory.
    """
    if options.write_policy == "write_back":
        return _WriteBack()
    if options.write_policy == "write_through_selective":
        return _WriteThroughSelective(options.min_uses, max_counted=8 * max(num_host_blocks, 1024))
    return _WriteThrough()
