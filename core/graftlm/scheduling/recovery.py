"""Fails or requeues requests after a failure of a step or of the bookkeeping, and when the KV memory is emptied."""

from collections.abc import Callable

from graftlm.contracts import PrefixCache
from graftlm.memory import KVManager
from graftlm.scheduling.live_requests import LiveRequests
from graftlm.scheduling.media_feeding import MediaFeeding
from graftlm.scheduling.planner import Planner
from graftlm.scheduling.prefetches import Prefetches
from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.running import RunningRequests
from graftlm.scheduling.steps_in_flight import StepsInFlight

__all__ = ["Recovery"]


class Recovery:
    """Fails the requests that cannot continue, and queues the other running requests again.

    There are four cases. "no" marks data that is no longer valid:

        a step failed on the device     pages of running rows: no    bookkeeping: yes    `fail_step`
        the weights were replaced       content of all pages: no     bookkeeping: yes    `restart_memory`
        the memory is released          content of all pages: no     bookkeeping: yes    `release_memory`
        the bookkeeping failed          pages: no                    bookkeeping: no     `recover`
    """

    def __init__(
        self,
        kv: KVManager,
        live: LiveRequests,
        running: RunningRequests,
        planner: Planner,
        prefetches: Prefetches,
        in_flight: StepsInFlight,
        media: MediaFeeding | None = None,
    ) -> None:
        self._kv = kv
        self._live = live
        self._running = running
        self._planner = planner
        self._prefetches = prefetches
        self._in_flight = in_flight
        self._media = media

    def fail_step(self, failed: tuple[Request, ...], error: str) -> None:
        """Fail the requests of a step that raised, and queue all other running requests again. See `Scheduler.fail`."""
        self._forget_steps()
        if self._kv.tiers is not None:
            self._kv.tiers.lose_copies()
        for request in list(self._running.requests):
            self._running.discard(request)
            if request not in failed:
                self._planner.requeue(request)
        for request in failed:
            if request.status is not RequestStatus.FINISHED:
                self._live.fail(request, error)
        self._kv.reset()

    def retract_all(self) -> None:
        """Put every running request back into the queue; no step may be in flight."""
        for request in list(self._running.requests):
            self._planner.retract(request)

    def restart_memory(self, make_cache: Callable[[], PrefixCache]) -> None:
        """Empty the KV memory and put running requests back into the queue. See `Scheduler.restart_memory`."""
        self.retract_all()
        if self._kv.tiers is None:
            self._kv.reset()
            return
        self._prefetches.forget()
        self._kv.restart(make_cache)

    def release_memory(self) -> None:
        """Empty the KV memory, and close a cache with lower tiers. See `Scheduler.release_memory`."""
        self.retract_all()
        self._kv.reset()  # reports every removed page to the observers
        if self._kv.tiers is not None:
            self._prefetches.forget()
            self._kv.close_cache()

    def recover(self, error: str, make_cache: Callable[[], PrefixCache], *, waiting_too: bool) -> None:
        """Empty the KV memory without relying on its bookkeeping. See `Scheduler.recover`."""
        self._forget_steps()
        culprit = self._planner.current
        failed = [r for r in self._live if waiting_too or r.status is RequestStatus.RUNNING or r is culprit]
        self._running.clear()
        self._prefetches.forget()
        self._planner.forget_rows()
        try:
            self._kv.restart(make_cache)
        except Exception:
            failed = list(self._live)
            raise
        finally:
            for request in failed:
                self._live.fail_without_row(request, error)

    def _forget_steps(self) -> None:
        """Drop the steps in flight. Requests that do not fail compute the tokens of these steps again."""
        self._in_flight.clear()
        if self._media is not None:
            self._media.clear()
        for request in self._live:
            request.num_in_flight = 0
            request.num_reads_planned = request.num_reads_reported
