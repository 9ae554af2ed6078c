"""Chooses the replica on which a request has the least work before it, from exact records of the caches.

The cost of a replica for a request is measured in tokens. It has three terms:

- the uncached tokens of the requests that wait there, because the request waits for them;
- `uncached_weight` times the request's own uncached tokens: their computation delays later requests too, and evicts
  other prefixes;
- `uncached_weight` times `balance_weight` times the mean number of uncached and output tokens of a request, times two
  shares: the replica's work divided by the mean work of all replicas plus the slack, and the number of its requests
  divided by the mean number plus `slack_requests`. Without this term, a short prefix that all requests share would
  attract all of them.

The replica with the lowest cost is chosen, subject to two bounds:

- Imbalance. The work of a replica is the number of tokens that it was given to compute, where older work counts less.
  Until a request ends, the mean output length counts. The slack is `slack_requests` times the mean number of uncached
  and output tokens of a request. A replica whose work exceeds
  (1 + imbalance) * mean + slack gets no request. The work of a replica therefore never exceeds this limit by more than
  one request.
- Staleness. Blocks of requests that have no token yet are assumed to be cached where the requests are. All other blocks
  are known from cache events, in their order. The blocks of a replica with requests whose latest message is older than
  `max_staleness_s` are ignored.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from graftlm.contracts import ReplicaStates, RoutedRequest, RoutingContext, RoutingPolicy
from graftlm_routing.block_index import BlockIndex
from graftlm_routing.masks import cheapest
from graftlm_routing.options import CacheAwareOptions

__all__ = ["CacheAware"]

#: Maximum number of different match lengths that are compared for a request. Shorter matches count as none.
_MAX_LEVELS: Final = 8

#: Expected number of output tokens of a request before the first request has ended.
_FIRST_OUTPUT: Final = 100.0

#: Number of requests over which means are taken.
_MEAN_OVER: Final = 100

#: Units of work are rescaled when the current unit exceeds this number.
_MAX_UNIT: Final = 2.0**40


class CacheAware(RoutingPolicy):
    """Weighs cached prefixes against queues, with bounds on imbalance and staleness."""

    uses_cache_events = True

    def __init__(self, options: CacheAwareOptions, context: RoutingContext) -> None:
        self.block_tokens: int = max(options.block_tokens, context.page_size)
        self._options = options
        self._index = BlockIndex(context.num_replicas, options.max_blocks)
        self._queued: NDArray[np.float64] = np.zeros(context.num_replicas)  # uncached, of requests without a token
        self._work: NDArray[np.float64] = np.zeros(context.num_replicas)  # in units of `_unit` per token
        self._mean_uncached = 0.0  # moving average of the uncached tokens of a request
        self._num_sent = 0  # number of requests in this average
        self._mean_output = _FIRST_OUTPUT  # moving average of the output tokens of a request
        self._num_ended = 0  # number of requests in this average
        self._expected: dict[RoutedRequest, float] = {}  # output tokens that are counted as work since `sent`
        self._running: NDArray[np.float64] = np.zeros(context.num_replicas)  # requests that have not ended
        self._total_work = 0.0
        self._unit = 1.0
        self._since_s: float | None = None  # clock reading at which `_unit` was 1
        self._sent: dict[RoutedRequest, tuple[int, Sequence[int]]] = {}  # uncached tokens, assumed digests

    def choose(self, request: RoutedRequest, replicas: ReplicaStates, now_s: float) -> int:
        """Return the allowed replica with the fewest tokens to compute before the request's first token."""
        self._age(now_s)
        options, ready, work = self._options, replicas.ready, self._work
        num_ready = int(np.count_nonzero(ready))
        mean = (self._total_work if num_ready == len(ready) else float(work @ ready)) / num_ready
        mean_request = self._mean_uncached + self._mean_output
        slack = options.slack_requests * mean_request * self._unit
        limit = (1 + options.imbalance) * mean + slack
        weight = options.uncached_weight
        balance = weight * options.balance_weight * mean_request
        costs = work * (balance / ((mean + slack) or 1.0))
        costs += self._running * (balance / (len(self._expected) / num_ready + options.slack_requests or 1.0))
        costs += self._queued
        costs = np.where(ready & (work <= limit), costs, np.inf)
        best = int(costs.argmin())
        best_cost = lowest = costs.item(best)
        self._exclude_stale(costs, replicas, now_s)
        for depth, holders in islice(self._index.levels(request.digests), _MAX_LEVELS):
            saved = depth * self.block_tokens * weight
            if best_cost <= lowest - saved:
                break
            replica = cheapest(holders, costs)
            cost = costs.item(replica) - saved
            if cost < best_cost:
                best, best_cost = replica, cost
        return best

    def _exclude_stale(self, costs: NDArray[np.float64], replicas: ReplicaStates, now_s: float) -> None:
        """Set the costs of replicas whose cached blocks must be ignored to infinity."""
        oldest_s = now_s - self._options.max_staleness_s
        if replicas.reported_s.min() < oldest_s:
            costs[(replicas.reported_s < oldest_s) & (replicas.num_requests > 0)] = np.inf

    def sent(self, request: RoutedRequest, replica: int) -> None:
        """Count the tokens that the replica must compute, and assume that it will hold the prompt's blocks."""
        digests = request.digests
        depth = self._index.match(digests, replica)
        uncached = max(1, len(request.token_ids) - depth * self.block_tokens)
        assumed = digests[depth:]
        self._queued[replica] += uncached
        self._num_sent = min(self._num_sent + 1, _MEAN_OVER)
        self._mean_uncached += (uncached - self._mean_uncached) / self._num_sent
        self._running[replica] += 1
        self._expected[request] = self._mean_output
        self._add_work(replica, uncached + self._mean_output)
        self._index.assume(replica, assumed)
        self._sent[request] = (uncached, assumed)

    def started(self, request: RoutedRequest, replica: int) -> None:
        """End the assumptions about the request, because cache events have reported its blocks."""
        uncached, assumed = self._sent.pop(request, (0, ()))
        self._queued[replica] -= uncached
        self._index.forget(replica, assumed)

    def ended(self, request: RoutedRequest, replica: int, num_output_tokens: int) -> None:
        """Count the output as work of the replica, instead of the expected output."""
        self.started(request, replica)
        self._running[replica] -= 1
        self._add_work(replica, num_output_tokens - self._expected.pop(request, 0.0))
        self._num_ended = min(self._num_ended + 1, _MEAN_OVER)
        self._mean_output += (num_output_tokens - self._mean_output) / self._num_ended

    def stored(self, replica: int, digests: Sequence[int]) -> None:
        """Add blocks to the index."""
        self._index.store(replica, digests)

    def removed(self, replica: int, digests: Sequence[int]) -> None:
        """Remove blocks from the index."""
        self._index.remove(replica, digests)

    def cleared(self, replica: int) -> None:
        """Remove all blocks of the replica."""
        self._index.clear(replica)

    def _add_work(self, replica: int, num_tokens: float) -> None:
        amount = num_tokens * self._unit
        self._work[replica] += amount
        self._total_work += amount

    def _age(self, now_s: float) -> None:
        """Raise the unit of new work, so that older work counts less."""
        if self._since_s is None:
            self._since_s = now_s
        self._unit = 2.0 ** min((now_s - self._since_s) / self._options.window_s, 1000.0)
        if self._unit > _MAX_UNIT:
            self._work /= self._unit
            self._total_work = float(self._work.sum())
            self._unit, self._since_s = 1.0, now_s
