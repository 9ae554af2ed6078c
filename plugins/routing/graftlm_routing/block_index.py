"""The index of `cache_aware`: which replica's cache holds which block.

A digest maps to a bit mask of replicas. A replica that holds a block holds the blocks before it, so the number of
matching blocks is found by binary search. Requests that are sent but not yet computed are indexed separately: their
blocks are assumed until the first token.

Clearing a replica would need a scan of all digests. Instead, the replica gets another bit, and its old bit is dead.
Dead bits are removed together, in one scan.
"""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm_routing.masks import bits_of

__all__ = ["BlockIndex"]

logger = logging.getLogger(__name__)


class BlockIndex:
    """Finds the replicas that hold the longest prefixes of a prompt.

    Args:
        num_replicas: number of replicas.
        max_blocks: maximum number of indexed digests. Further blocks are ignored.
    """

    def __init__(self, num_replicas: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._max_dead = max(64, num_replicas)
        self._held: dict[int, int] = {}
        self._assumed: dict[int, int] = {}
        self._bits = list(range(num_replicas))  # replica -> number of its bit
        self._owners = np.arange(num_replicas)  # number of a bit -> replica
        self._live = (1 << num_replicas) - 1
        self._dead: list[int] = []
        self._free: list[int] = []
        self._is_full = False

    def __len__(self) -> int:
        return len(self._held)

    def levels(self, digests: Sequence[int]) -> Iterator[tuple[int, Sequence[int] | NDArray[np.intp]]]:
        """Yield (number of matching blocks, replicas), with the longest match first; each replica once.

        Replicas without a match are not yielded.

        Args:
            digests: digests of a prompt's blocks.
        """
        wanted, high = self._live, len(digests)
        while high and wanted:
            depth, found = self._deepest(digests, wanted, high)
            if not depth:
                return
            bits = bits_of(found)
            yield depth, self._owners[bits] if isinstance(bits, np.ndarray) else [*map(self._owners.item, bits)]
            wanted &= ~found
            high = depth - 1

    def match(self, digests: Sequence[int], replica: int) -> int:
        """Return the number of a prompt's blocks that one replica holds."""
        return self._deepest(digests, 1 << self._bits[replica], len(digests))[0]

    def store(self, replica: int, digests: Sequence[int]) -> None:
        """Record that a replica holds blocks."""
        bit, held = 1 << self._bits[replica], self._held
        if len(held) + len(digests) > self._max_blocks:
            digests = self._that_fit(digests)
        for digest in digests:
            held[digest] = held.get(digest, 0) | bit

    def remove(self, replica: int, digests: Sequence[int]) -> None:
        """Record that a replica does not hold blocks any more."""
        _unset(self._held, digests, 1 << self._bits[replica])

    def assume(self, replica: int, digests: Sequence[int]) -> None:
        """Record that a replica will hold blocks."""
        bit, assumed = 1 << self._bits[replica], self._assumed
        for digest in digests:
            assumed[digest] = assumed.get(digest, 0) | bit

    def forget(self, replica: int, digests: Sequence[int]) -> None:
        """Undo `assume`."""
        _unset(self._assumed, digests, 1 << self._bits[replica])

    def clear(self, replica: int) -> None:
        """Record that a replica holds nothing."""
        dead = self._bits[replica]
        self._live &= ~(1 << dead)
        self._dead.append(dead)
        if not self._free:
            self._free.append(len(self._owners))
            self._owners = np.append(self._owners, replica)
        bit = self._free.pop()
        self._bits[replica], self._owners[bit] = bit, replica
        self._live |= 1 << bit
        if len(self._dead) >= self._max_dead:
            self._remove_dead()

    def _deepest(self, digests: Sequence[int], wanted: int, high: int) -> tuple[int, int]:
        """Return the number of leading blocks that a wanted replica holds, and the mask of these replicas.

        Args:
            wanted: mask of the replicas to consider.
            high: maximum number of blocks.
        """
        held, assumed = self._held.get, self._assumed.get
        depth, found = 0, 0
        while depth < high:
            middle = (depth + high + 1) // 2
            digest = digests[middle - 1]
            mask = (held(digest, 0) | assumed(digest, 0)) & wanted
            if mask:
                depth, found = middle, mask
            else:
                high = middle - 1
        return depth, found

    def _remove_dead(self) -> None:
        live = self._live
        for table in (self._held, self._assumed):
            for digest in [digest for digest, mask in table.items() if mask & ~live]:
                mask = table[digest] & live
                if mask:
                    table[digest] = mask
                else:
                    del table[digest]
        self._free += self._dead
        self._dead = []

    def _that_fit(self, digests: Sequence[int]) -> Sequence[int]:
        """Return the digests that can be stored without exceeding the limit."""
        if self._dead:
            self._remove_dead()
        room = self._max_blocks - len(self._held)
        if len(digests) <= room:
            return digests
        if not self._is_full:
            self._is_full = True
            logger.warning(
                "the index of cache_aware is full: %d blocks. Further blocks are ignored; raise max_blocks or "
                "block_tokens",
                self._max_blocks,
            )
        known = [digest for digest in digests if digest in self._held]
        return known + [digest for digest in digests if digest not in self._held][: max(0, room)]


def _unset(table: dict[int, int], digests: Sequence[int], bit: int) -> None:
    for digest in digests:
        mask = table.get(digest, 0)
        if mask & bit:
            if mask == bit:
                del table[digest]
            else:
                table[digest] = mask ^ bit
