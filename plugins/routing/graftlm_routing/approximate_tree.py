"""Chooses by an approximate tree of the prompts that were sent to each replica, as SGLang's router does.

The tree contains what was sent, and not what the caches hold: it needs no cache events. A digest stands for the path
from the root to a block, so the tree is a table of digests. The two rules and their thresholds are those of the policy
`cache_aware` of sglang-router.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import ReplicaStates, RoutedRequest, RoutingPolicy
from graftlm_routing.masks import bits_of, cheapest, mask_of
from graftlm_routing.options import ApproximateTreeOptions

__all__ = ["ApproximateTree"]


class ApproximateTree(RoutingPolicy):
    """Chooses the replica with the longest match, unless the loads are unbalanced or the match is short."""

    def __init__(self, options: ApproximateTreeOptions, num_replicas: int) -> None:
        self.block_tokens: int = options.block_tokens
        self._options = options
        self._holders: dict[int, int] = {}  # digest -> bit mask of replicas
        # For each replica, its digests in order of their last use; a block comes before its parent.
        self._used: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._num_blocks: NDArray[np.int64] = np.zeros(num_replicas, dtype=np.int64)

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the replica with the fewest requests, with the longest match, or with the smallest tree."""
        ready = np.flatnonzero(replicas.ready)
        loads = replicas.num_requests[ready]
        least, most = int(loads.min()), int(loads.max())
        options = self._options
        if most - least > options.balance_abs_threshold and most > options.balance_rel_threshold * least:
            return int(ready[loads.argmin()])
        depth, mask = self._longest_match(request.digests, replicas)
        if depth * self.block_tokens > options.cache_threshold * len(request.token_ids):
            return cheapest(bits_of(mask), replicas.num_requests)
        return int(ready[self._num_blocks[ready].argmin()])

    def sent(self, request: RoutedRequest, replica: int) -> None:
        """Insert the prompt's blocks into the tree, and remove the least recently used ones."""
        used, bit = self._used[replica], 1 << replica
        for digest in reversed(request.digests):
            if digest in used:
                used.move_to_end(digest)
            else:
                used[digest] = None
                self._holders[digest] = self._holders.get(digest, 0) | bit
        while len(used) > self._options.max_blocks:
            self._forget(used.popitem(last=False)[0], bit)
        self._num_blocks[replica] = len(used)

    def cleared(self, replica: int) -> None:
        """Remove all blocks of the replica."""
        for digest in self._used[replica]:
            self._forget(digest, 1 << replica)
        self._used[replica].clear()
        self._num_blocks[replica] = 0

    def _longest_match(self, digests: Sequence[int], replicas: ReplicaStates) -> tuple[int, int]:
        """Return the number of blocks that a ready replica has, and the mask of the ready replicas that have them."""
        ready = mask_of(replicas.ready)
        depth, mask, high = 0, 0, len(digests)
        while depth < high:  # a replica that has a block has the blocks before it
            middle = (depth + high + 1) // 2
            found = self._holders.get(digests[middle - 1], 0) & ready
            if found:
                depth, mask = middle, found
            else:
                high = middle - 1
        return depth, mask

    def _forget(self, digest: int, bit: int) -> None:
        mask = self._holders[digest] & ~bit
        if mask:
            self._holders[digest] = mask
        else:
            del self._holders[digest]
