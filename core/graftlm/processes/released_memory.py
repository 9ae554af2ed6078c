"""The memory that the replicas have released, and its return."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Literal, TypeAlias

from graftlm.errors import RequestError, UnavailableError
from graftlm.processes.calls import ProcessCalls
from graftlm.processes.in_flight import InFlightRequests
from graftlm.processes.replicas import ReplicaSet
from graftlm.processes.served_weights import UPDATE_TIMEOUT_S, ServedWeights

__all__ = ["TAGS", "ReleasedMemory", "WithRunning"]

logger = logging.getLogger(__name__)

#: The kinds of memory that can be released.
TAGS: Final = ("kv_cache", "weights")

#: What happens with the running requests: they are a reason for an error, are aborted, end first, or are paused.
WithRunning: TypeAlias = Literal["refuse", "abort", "wait", "keep"]


class ReleasedMemory:
    """Releases and resumes memory of all replicas. Used by one event loop.

    While any memory is released, the server sleeps: new requests get UnavailableError, or wait if generation is paused.

    Args:
        calls: calls to the replicas.
        in_flight: the prompts that have not ended.
        weights: the weights of the replicas; its lock also prevents a release during an update.
        abort_all: aborts every prompt in flight.
        pause: pauses generation; the argument is the mode.
        resume: continues generation.

    Attributes:
        tags: the kinds of memory that are released.
    """

    def __init__(
        self,
        calls: ProcessCalls,
        replicas: ReplicaSet,
        in_flight: InFlightRequests,
        weights: ServedWeights,
        abort_all: Callable[[], None],
        pause: Callable[[str], Awaitable[None]],
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self.tags: frozenset[str] = frozenset()
        self._calls = calls
        self._replicas = replicas
        self._in_flight = in_flight
        self._weights = weights
        self._abort_all = abort_all
        self._pause = pause
        self._resume = resume
        self._continues = False  # whether the end of the sleep ends the pause
        self._tasks: set[asyncio.Task[None]] = set()

    async def release(self, tags: Collection[str], *, keep_weights: bool, running: WithRunning) -> None:
        """Release memory of every replica, and refuse new requests from now on.

        If generation is paused, paused requests do not prevent the release. After `resume` and the end of the pause,
        they are computed again.

        Args:
            tags: elements of `TAGS`.
            keep_weights: whether `resume` restores released weights; False: they are dropped.
            running: what happens with running requests.

        Raises:
            RequestError: requests are running and `running` is "refuse", or the weights cannot be released.
            UnavailableError: no replica runs, or a replica could not release its memory. In the second case, the server
                sleeps.
        """
        if not tags:  # for instance, a request that names only memory that is never released
            return
        async with self._weights.lock:
            if not self._replicas.up:
                raise UnavailableError(self._replicas.why_unavailable)
            if running == "refuse" and len(self._in_flight) and not self._replicas.health.paused:
                raise RequestError(
                    f"{len(self._in_flight)} requests are running; wait until they have ended, abort them, or pause "
                    "generation first"
                )
            self._replicas.hold()
            try:
                await self._stop_requests(running)
                await self._release(frozenset(tags), keep_weights=keep_weights)
            finally:
                self._replicas.release()

    async def resume(self, tags: Collection[str]) -> None:
        """Allocate released memory of every replica again. The server is awake when no memory is released.

        Args:
            tags: elements of `TAGS`. Memory that is not released has no effect.

        Raises:
            UnavailableError: a replica could not allocate its memory. It stays released; `resume` may be called again.
        """
        async with self._weights.lock:
            wanted = sorted(self.tags & set(tags))
            if not wanted:
                return
            outcomes = await self._call("resume_memory", {"tags": wanted})
            failed = _failures(outcomes, {replica.name for replica in self._replicas.up})
            if failed:
                raise UnavailableError(f"memory stays released: {failed}")
            for name, lacking in outcomes.items():
                if isinstance(lacking, str):
                    self._weights.note_lacking(name, lacking)
            self.tags -= set(wanted)
            if self.tags:
                self._replicas.sleep(_reason(self.tags))
                return
            self._replicas.wake()
        logger.info("the server is awake")
        if self._continues:
            self._continues = False
            await self._resume()

    def process_ready(self, name: str) -> None:
        """Handle the start of a replica, which has all its memory and the configured weights."""
        if self.tags or self._weights.are_dropped:
            task = asyncio.get_running_loop().create_task(self._adapt(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stop_requests(self, running: WithRunning) -> None:
        if running == "keep":
            if not self._replicas.health.paused:
                await self._pause("retract")
                self._continues = True
            return
        if running == "abort":
            self._abort_all()
        if running == "abort" or not self._replicas.health.paused:
            await self._in_flight.wait_until_empty()

    async def _release(self, tags: frozenset[str], *, keep_weights: bool) -> None:
        outcomes = await self._call("release_memory", {"tags": sorted(tags), "keep_weights": keep_weights})
        refusals = [outcome for outcome in outcomes.values() if isinstance(outcome, RequestError)]
        if outcomes and len(refusals) == len(outcomes):
            await self._end_keep()
            raise refusals[0]
        self.tags |= tags
        self._replicas.sleep(_reason(self.tags))
        logger.info("%s", _reason(self.tags))
        if not keep_weights and "weights" in tags:
            self._weights.note_dropped()
        for replica in self._replicas.up:  # replicas that were restarted during the calls
            if isinstance(outcomes.get(replica.name, UnavailableError()), UnavailableError):
                self.process_ready(replica.name)
        failed = _failures(outcomes, outcomes)
        if failed:
            raise UnavailableError(f"the server sleeps, but not all memory is released: {failed}")

    async def _end_keep(self) -> None:
        if self._continues and not self.tags:
            self._continues = False
            await self._resume()

    async def _adapt(self, name: str) -> None:
        """Bring a replica that was restarted into the state of the other replicas."""
        async with self._weights.lock:
            calls: list[tuple[str, dict[str, object]]] = []
            if self._weights.are_dropped:
                calls.append(("drop_weights", {}))
            if self.tags:
                calls.append(("release_memory", {"tags": sorted(self.tags), "keep_weights": True}))
            for call, arguments in calls:
                outcomes = await self._calls.call_each([name], call, arguments, UPDATE_TIMEOUT_S)
                if isinstance(outcomes[name], BaseException):
                    logger.error("%s was restarted, and %s failed: %s", name, call, outcomes[name])
                    return
            if self.tags:
                logger.info("%s was restarted while the server sleeps, and has released its memory", name)

    async def _call(self, name: str, arguments: Mapping[str, object]) -> dict[str, object]:
        names = [replica.name for replica in self._replicas.up]
        return await self._calls.call_each(names, name, arguments, UPDATE_TIMEOUT_S)


def _reason(tags: Collection[str]) -> str:
    return (
        f"the server sleeps: its memory is released ({', '.join(sorted(tags))}). Wake it up with /wake_up or "
        "/resume_memory_occupation."
    )


def _failures(outcomes: Mapping[str, object], names: Collection[str]) -> str:
    """Return the errors of these replicas as text; "" if there are none."""
    return "; ".join(
        f"{name}: {outcome}"
        for name, outcome in outcomes.items()
        if isinstance(outcome, BaseException) and name in names
    )
