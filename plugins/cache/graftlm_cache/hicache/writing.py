"""When a block on the device is worth a copy in host memory."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from graftlm_cache.hicache.options import HicacheOptions

__all__ = ["WritePolicy", "write_policy"]


class WritePolicy(ABC):
    """Decides, block by block.

    Attributes:
        on_eviction: whether blocks that were not copied before are copied when they are evicted.
    """

    on_eviction: bool = False

    def used(self, keys: Sequence[bytes]) -> None:
        """A request has come whose prompt has these blocks."""
        return

    @abstractmethod
    def wants(self, key: bytes) -> bool:
        """Return whether a block that is computed is to be copied now."""


class _WriteThrough(WritePolicy):
    def wants(self, key: bytes) -> bool:
        """Return True: every block."""
        return True


class _WriteThroughSelective(WritePolicy):
    """Counts the requests that used a block, for as many blocks as `memory` says, those used lately."""

    def __init__(self, min_uses: int, memory: int) -> None:
        self._min_uses = min_uses
        self._memory = memory
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def used(self, keys: Sequence[bytes]) -> None:
        """Count one use of each block."""
        for key in reversed(keys):
            self._uses[key] = self._uses.pop(key, 0) + 1
        while len(self._uses) > self._memory:
            self._uses.popitem(last=False)

    def wants(self, key: bytes) -> bool:
        """Return whether enough requests have used the block."""
        return self._uses.get(key, 0) >= self._min_uses


class _WriteBack(WritePolicy):
    on_eviction = True

    def wants(self, key: bytes) -> bool:
        """Return False: not before it is evicted."""
        return False


def write_policy(options: HicacheOptions, num_host_blocks: int) -> WritePolicy:
    """Return the policy that options name."""
    if options.write_policy == "write_back":
        return _WriteBack()
    if options.write_policy == "write_through_selective":
        return _WriteThroughSelective(options.min_uses, memory=8 * max(num_host_blocks, 1024))
    return _WriteThrough()
