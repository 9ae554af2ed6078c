"""The state of the processes, and the choice of a replica for each request."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftlm.errors import UnavailableError
from graftlm.processes.messages import Load
from graftlm.processes.names import DETOKENIZER

__all__ = ["Health", "Replica", "ReplicaSet", "choose_replica"]


@dataclass(frozen=True, slots=True)
class Health:
    """The health of the server.

    Attributes:
        problems: the current problems, one line each.
        draining: whether new requests are refused, because the server is shutting down.
        serving: whether the detokenizer and at least one replica work.
        paused: whether requests wait until generation is resumed.
        sleeping: whether memory is released, so that no request can run.
    """

    problems: tuple[str, ...] = ()
    draining: bool = False
    serving: bool = True
    paused: bool = False
    sleeping: bool = False

    @property
    def ok(self) -> bool:
        """Whether a load balancer should send requests to this server. Some replicas may be down."""
        return self.serving and not self.draining


@dataclass(slots=True, eq=False)
class Replica:
    """One replica of the model, with counts of its requests.

    Attributes:
        name: name of the replica's process, such as "scheduler-0".
        ready: whether the replica accepts requests.
        queued_tokens: total number of prompt tokens of the replica's requests that have no output token yet.
        num_requests: number of the replica's prompts that have not ended.
        load: the latest report of the replica; None before the first report.
        outdated: reason why the process does not have the current weights; None if it has them. An outdated replica
            accepts no requests.
    """

    name: str
    ready: bool = False
    queued_tokens: int = 0
    num_requests: int = 0
    load: Load | None = None
    outdated: str | None = None


def choose_replica(replicas: Iterable[Replica]) -> Replica | None:
    """Return the ready replica with the fewest queued tokens. If several have the fewest, their `num_requests` decides.

    Returns: None if no replica is ready.
    """
    ready = [replica for replica in replicas if replica.ready]
    return min(ready, key=lambda r: (r.queued_tokens, r.num_requests), default=None)


@dataclass(slots=True, eq=False)
class _Problem:
    """The reason why a process does not work.

    Attributes:
        text: the reason.
        dead: True if the process has ended; False if the process runs but does not answer.
    """

    text: str
    dead: bool


class ReplicaSet:
    """The replicas, the problems of the processes, and the prompts that wait for a replica.

    Args:
        names: names of the replicas' processes.
        can_recover: whether processes that die are restarted.

    Attributes:
        replicas: all replicas.
        draining: whether new requests are refused, because the server is shutting down.
    """

    def __init__(self, names: Sequence[str], can_recover: bool) -> None:
        self.replicas = [Replica(name) for name in names]
        self.draining = False
        self._can_recover = can_recover
        self._problems: dict[str, _Problem] = {}
        self._paused = False
        self._held = False
        self._asleep: str | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def named(self, name: str) -> Replica | None:
        """Return the replica with this process name; None if there is none."""
        return next((replica for replica in self.replicas if replica.name == name), None)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that accept requests."""
        return [replica for replica in self.replicas if replica.ready]

    @property
    def health(self) -> Health:
        """The health of the server, with the current problems."""
        works = any(replica.ready and replica.name not in self._problems for replica in self.replicas)
        asleep = () if self._asleep is None else (self._asleep,)
        return Health(
            problems=(*asleep, *[problem.text for problem in self._problems.values()], *self._outdated),
            draining=self.draining,
            serving=works and DETOKENIZER not in self._problems and not asleep,
            paused=self._paused,
            sleeping=bool(asleep),
        )

    @property
    def num_held(self) -> int:
        """Number of prompts that wait in `take` for a replica or for the end of a pause."""
        return len(self._waiting)

    @property
    def why_unavailable(self) -> str:
        """The reason why no replica accepts requests."""
        return "; ".join(self.health.problems) or "no replica of the model is ready"

    async def take(self, timeout_s: float | None) -> Replica:
        """Return the replica for the next request. Waits during a pause, or while all replicas are being restarted.

        Args:
            timeout_s: maximum wait in seconds; None for no limit.

        Raises:
            UnavailableError: no replica works and none will be restarted, the server is draining, memory is released
                and generation is not paused, or the time limit has been exceeded.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (replica := self._free_replica()) is None:
                    future = asyncio.get_running_loop().create_future()
                    self._waiting.add(future)
                    try:
                        await future
                    finally:
                        self._waiting.discard(future)
                return replica
        except TimeoutError:
            raise UnavailableError(self.why_unavailable) from None

    def started(self, name: str) -> None:
        """Record that a process is ready for messages."""
        self._problems.pop(name, None)
        replica = self.named(name)
        if replica is not None:
            replica.ready = True
        self._wake()

    def died(self, name: str, reason: str) -> None:
        """Record that a process has ended."""
        self._problems[name] = _Problem(f"{name} died: {reason}", dead=True)
        replica = self.named(name)
        if replica is not None:
            replica.ready, replica.outdated, replica.load = False, None, None
        self._wake()

    def stuck(self, name: str, seconds: float) -> None:
        """Record that a process has not answered a ping for this number of seconds."""
        self._problems[name] = _Problem(f"{name} has not answered for {seconds:.0f} s", dead=False)

    def recovered(self, name: str) -> None:
        """Record that a stuck process answers again."""
        if name in self._problems and not self._problems[name].dead:
            del self._problems[name]

    def end_restarts(self) -> None:
        """Record that no process will be restarted any more. Waiting requests fail if no replica works."""
        self._can_recover = False
        self._wake()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self._wake()

    def pause(self) -> None:
        """Make new requests wait until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """End `pause`."""
        self._paused = False
        self._wake()

    def hold(self) -> None:
        """Make new requests wait until `release`, independently of `pause`."""
        self._held = True

    def release(self) -> None:
        """End `hold`."""
        self._held = False
        self._wake()

    def sleep(self, reason: str) -> None:
        """Refuse new requests with this reason until `wake`. During a pause, they wait instead."""
        self._asleep = reason

    def wake(self) -> None:
        """End `sleep`."""
        self._asleep = None
        self._wake()

    @property
    def up(self) -> list[Replica]:
        """The replicas whose processes run, including those with outdated weights."""
        return [replica for replica in self.replicas if replica.ready or replica.outdated is not None]

    def mark_outdated(self, name: str, reason: str = "does not have the current weights: update them again") -> None:
        """Record that a replica does not have the current weights. It accepts no requests from now on."""
        replica = self.named(name)
        if replica is not None:
            replica.ready, replica.outdated = False, reason

    def mark_current(self, name: str) -> None:
        """Record that an outdated replica has the current weights now."""
        replica = self.named(name)
        if replica is not None and replica.outdated is not None:
            replica.ready, replica.outdated = True, None
            self._wake()

    @property
    def _outdated(self) -> list[str]:
        return [f"{replica.name} {replica.outdated}" for replica in self.replicas if replica.outdated is not None]

    def _free_replica(self) -> Replica | None:
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self._asleep is not None and not self._held:
            if self._paused:
                return None
            raise UnavailableError(self._asleep)
        problem = self._problems.get(DETOKENIZER)
        detokenizer_runs = problem is None or not problem.dead
        replica = choose_replica(self.replicas) if detokenizer_runs else None
        if replica is None and not self._can_recover:
            raise UnavailableError(self.why_unavailable)
        # Outdated replicas become ready only through an update of the weights. Requests wait only during an update.
        if not self._held and all(replica.outdated is not None for replica in self.replicas):
            raise UnavailableError(self.why_unavailable)
        return None if self._paused or self._held else replica

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
