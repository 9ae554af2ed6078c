"""The state of the processes, and the choice of a replica for each request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from graftlm.errors import UnavailableError
from graftlm.processes.messages import Load
from graftlm.processes.names import DETOKENIZER
from graftlm.routing import Route, Router

__all__ = ["Health", "Replica", "ReplicaSet"]


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


class Replica:
    """One replica of the model, with counts of its requests.

    Args:
        name: name of the replica's process, such as "scheduler-0".
        router: the router of all replicas; None: a router for this replica only.
        number: number of the replica in the router.

    Attributes:
        name: see above.
        load: the latest report of the replica; None before the first report.
        outdated: reason why the process does not have the current weights; None if it has them. An outdated replica
            accepts no requests.
    """

    def __init__(self, name: str, router: Router | None = None, number: int = 0) -> None:
        self.name = name
        self.load: Load | None = None
        self.outdated: str | None = None
        self._router = router or Router(1)
        self._number = number

    @property
    def ready(self) -> bool:
        """Whether the replica accepts requests."""
        return bool(self._router.states.ready[self._number])

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._router.states.ready[self._number] = ready

    @property
    def queued_tokens(self) -> int:
        """Total number of prompt tokens of the replica's requests that have no output token yet."""
        return int(self._router.states.queued_tokens[self._number])

    @property
    def num_requests(self) -> int:
        """Number of the replica's prompts that have not ended."""
        return int(self._router.states.num_requests[self._number])

    def sent(self, route: Route) -> None:
        """Count a prompt that is sent to this replica."""
        self._router.sent(route, self._number)

    def started(self, route: Route) -> None:
        """Record the first token of a prompt. The prompt no longer counts as queued."""
        self._router.started(route)

    def ended(self, route: Route, num_output_tokens: int) -> None:
        """Record the end of a prompt, for any reason."""
        self._router.ended(route, num_output_tokens)

    def report(self, load: Load) -> None:
        """Record a load report."""
        self.load = load
        self._router.report(self._number)

    def report_cache(self, changes: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Record changes of the replica's prefix cache; see `Router.report`."""
        self._router.report(self._number, changes)

    def died(self) -> None:
        """Record that the replica's process has ended."""
        self.ready, self.outdated, self.load = False, None, None
        self._router.clear(self._number)


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
        router: chooses the replicas; None: the least loaded replica is chosen.

    Attributes:
        replicas: all replicas.
        router: see above.
        draining: whether new requests are refused, because the server is shutting down.
    """

    def __init__(self, names: Sequence[str], can_recover: bool, router: Router | None = None) -> None:
        self.router = router or Router(len(names))
        self.replicas = [Replica(name, self.router, number) for number, name in enumerate(names)]
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

    async def take(self, timeout_s: float | None, route: Route) -> Replica:
        """Return the replica for a request. Waits during a pause, or while all replicas are being restarted.

        Args:
            timeout_s: maximum wait in seconds; None for no limit.
            route: the request, which `router` has created.

        Raises:
            UnavailableError: no replica works and none will be restarted, the server is draining, memory is released
                and generation is not paused, or the time limit has been exceeded.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (replica := self._free_replica(route)) is None:
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
            replica.died()
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

    def _free_replica(self, route: Route) -> Replica | None:
        if self.draining:
            raise UnavailableError("the server is shutting down")
        if self._asleep is not None and not self._held:
            if self._paused:
                return None
            raise UnavailableError(self._asleep)
        problem = self._problems.get(DETOKENIZER)
        detokenizer_runs = problem is None or not problem.dead
        can_send = detokenizer_runs and not self._paused and not self._held
        number = self.router.choose(route) if can_send else None
        if not self._can_recover and not (detokenizer_runs and self.ready):
            raise UnavailableError(self.why_unavailable)
        # Outdated replicas become ready only through an update of the weights. Requests wait only during an update.
        if not self._held and all(replica.outdated is not None for replica in self.replicas):
            raise UnavailableError(self.why_unavailable)
        return None if number is None else self.replicas[number]

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
