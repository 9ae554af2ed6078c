"""The queue of waiting requests, and their order of admission."""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

from graftlm.contracts import PrefixCache, PrefixGroup, PrefixKey, ProbePlace, SchedulingPolicy
from graftlm.scheduling.ageing import Ageing
from graftlm.scheduling.prompt_tree import PromptNode, PromptTree
from graftlm.scheduling.request import Request

__all__ = ["QueueEntry", "WaitingQueue"]

logger = logging.getLogger(__name__)


class QueueEntry:
    """The view of a waiting request that policies read; implements `graftlm.contracts.WaitingRequest`.

    Attributes:
        node: node of the request in the tree of waiting requests; None until a policy reads a group.
    """

    __slots__ = ("_cached_tokens", "_key", "_place", "_probed_at", "_queue", "arrival_s", "node", "priority", "request")

    def __init__(self, request: Request, queue: "WaitingQueue") -> None:
        self.request = request
        self.arrival_s = request.arrival_s
        self.priority = request.priority
        self.node: PromptNode | None = None
        self._queue = queue
        self._key: PrefixKey | None = None
        self._place: ProbePlace | None = None
        self._probed_at: object = None
        self._cached_tokens = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Number of tokens to prefill before sampling."""
        return self.request.num_tokens

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens that the request may still generate."""
        return self.request.max_len - self.request.num_tokens

    @property
    def cached_tokens(self) -> int:
        """Number of cached tokens.

        After a change of the cache, the number is looked up again. The lookup starts at the result of the last one.
        """
        queue = self._queue
        if self._probed_at is not queue.moment:
            self._probe(queue)
        return self._cached_tokens

    @property
    def group(self) -> PrefixGroup | None:
        """The smallest group of waiting requests that contains this request."""
        if self.node is None:
            self._queue.plant()
        return None if self.node is None else self.node.group

    def forget_place(self) -> None:
        """Forget the last lookup, because the cache was replaced. The next lookup starts at the first token."""
        self._place = None

    def _probe(self, queue: "WaitingQueue") -> None:
        key = self._key
        if key is None or self.request.num_in_flight:  # with a step in flight, the next token is not known yet
            key, self._place = self.request.reusable_key(), None
            self._key = None if self.request.num_in_flight else key
        self._place = place = queue.cache.probe_again(key, self._place)
        self._cached_tokens = 0 if place is None else place.num_pages * queue.page_size
        self._probed_at = queue.moment


class WaitingQueue:
    """Waiting requests in order of arrival.

    Requests are ordered by priority. Within a priority, requests that were passed over for the policy's `max_wait_s`
    (see `Ageing`) come first, in order of arrival. The other requests follow in the policy's order.

    Attributes:
        cache: the cache in which entries look up their tokens; set by `ordered`.
        moment: an object that is replaced whenever the cache has changed between two calls of `ordered`.
    """

    def __init__(self, policy: SchedulingPolicy, cache: Callable[[], PrefixCache], page_size: int) -> None:
        self.page_size = page_size
        self.cache = cache()
        self.moment = object()
        self._policy = policy
        self._current_cache = cache
        self._seen_version = self.cache.version
        self._entries: dict[str, QueueEntry] = {}
        self._num_by_priority: Counter[int] = Counter()
        self._numbers = itertools.count()
        self._ageing = Ageing()
        self._tree = PromptTree(page_size)
        self._unplanted: dict[str, QueueEntry] = {}  # request id -> entry that is not in the tree yet
        self._logged_faults: set[str] = set()  # kinds of the policy's faults; a fault may recur at every step

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._entries.values())

    @property
    def num_aged(self) -> int:
        """Number of aged requests since the start."""
        return self._ageing.num_aged

    @property
    def highest_priority(self) -> int | None:
        """The priority of the most important request; None if the queue is empty."""
        return max(self._num_by_priority, default=None)

    def add(self, request: Request) -> None:
        """Add a request at its position in the order of arrival, also after a retraction."""
        if not request.num_retractions:
            request.queue_number = next(self._numbers)
        last = next(reversed(self._entries.values()), None)
        entry = self._entries[request.request_id] = QueueEntry(request, self)
        if last is not None and last.request.seniority > request.seniority:
            self._entries = dict(sorted(self._entries.items(), key=lambda item: item[1].request.seniority))
        self._num_by_priority[request.priority] += 1
        self._ageing.add(request)
        self._unplanted[request.request_id] = entry

    def remove(self, request: Request) -> None:
        """Remove a request."""
        entry = self._entries.pop(request.request_id)
        self._num_by_priority[request.priority] -= 1
        if not self._num_by_priority[request.priority]:
            del self._num_by_priority[request.priority]
        self._ageing.remove(request)
        if entry.node is None:
            del self._unplanted[request.request_id]
        else:
            self._tree.remove(entry.node, request.namespace)

    def discard(self, request: Request) -> None:
        """Remove a request if the queue contains it."""
        if request.request_id in self._entries:
            self.remove(request)

    def admit(self, request: Request, now: float) -> None:
        """Remove an admitted request, and record the requests that it passed over."""
        self.remove(request)
        self._ageing.admitted(request, now)

    def ordered(self, now: float) -> list[Request]:
        """Return the requests in order of admission."""
        order = list(self._entries.values())
        if len(order) > 1:
            self._look_at_cache()
            order = self._policy_order(order, now)
            if len(self._num_by_priority) > 1:
                order.sort(key=lambda entry: -entry.priority)
        return [entry.request for entry in order]

    def plant(self) -> None:
        """Add the requests queued since the last call to the tree."""
        for entry in self._unplanted.values():
            entry.node = self._tree.add(entry.request.token_ids, entry.request.namespace)
        self._unplanted.clear()

    def _look_at_cache(self) -> None:
        cache = self._current_cache()
        if cache is not self.cache:
            for entry in self._entries.values():
                entry.forget_place()
        elif cache.version == self._seen_version:
            return
        self.cache, self._seen_version, self.moment = cache, cache.version, object()

    def _policy_order(self, waiting: list[QueueEntry], now: float) -> list[QueueEntry]:
        """Return the policy's order; if the policy raises or does not return a permutation, the order of arrival.

        The policy gets a copy of the list. If it changes the copy, no request is lost.
        """
        try:
            order = list(cast(list[QueueEntry], self._policy.order(list(waiting), now)))
            if len(order) == len(waiting) and set(map(id, order)) == set(map(id, waiting)):
                return self._aged_first(order, now)
            self._log_fault("did not return a permutation")
        except Exception as error:
            self._log_fault(f"failed with {type(error).__name__}", error)
        return waiting

    def _log_fault(self, what: str, error: Exception | None = None) -> None:
        """Log a fault of the policy, once for each kind."""
        if what not in self._logged_faults:
            self._logged_faults.add(what)
            logger.error(
                "scheduling policy %s %s; using arrival order. Further failures of this kind are not logged.",
                type(self._policy),
                what,
                exc_info=error,
            )

    def _aged_first(self, order: list[QueueEntry], now: float) -> list[QueueEntry]:
        limit_s = self._policy.max_wait_s
        aged = {} if limit_s is None else self._ageing.aged(limit_s, now)
        if not aged:
            return order
        first = [entry for entry in self._entries.values() if entry.request_id in aged]
        return first + [entry for entry in order if entry.request_id not in aged]
