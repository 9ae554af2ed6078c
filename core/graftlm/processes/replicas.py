"""Which processes are up, and which replica of the model a request goes to."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from graftlm.errors import UnavailableError
from graftlm.processes.messages import Load
from graftlm.processes.names import DETOKENIZER

__all__ = ["Health", "Replica", "ReplicaSet", "choose_replica"]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether requests are served.

    Attributes:
        problems: what is wrong, one line each; empty when all is well.
        serving: whether a replica works, with all that it needs.
        paused: requests wait until generation is resumed.
    """

    problems: tuple[str, ...] = ()
    draining: bool = False
    serving: bool = True
    paused: bool = False

    @property
    def ok(self) -> bool:
        """Whether a load balancer should send requests here; some replicas may be down."""
        return self.serving and not self.draining


@dataclass(slots=True, eq=False)
class Replica:
    """One scheduler process and what it was given.

    Attributes:
        name: of its process, "scheduler-0".
        ready: whether it takes requests.
        queued_tokens: prompt tokens of requests that have not shown a token yet.
        num_requests: prompts that have not ended.
        load: its latest report.
        outdated: it is up, with other weights than the rest, and takes no requests.
    """

    name: str
    ready: bool = False
    queued_tokens: int = 0
    num_requests: int = 0
    load: Load | None = None
    outdated: bool = False


def choose_replica(replicas: Iterable[Replica]) -> Replica | None:
    """Return the ready replica with the fewest queued tokens, of several the one with the fewest requests."""
    ready = [replica for replica in replicas if replica.ready]
    return min(ready, key=lambda r: (r.queued_tokens, r.num_requests), default=None)


@dataclass(slots=True, eq=False)
class _Trouble:
    """Why a process does not serve.

    Attributes:
        dead: it is gone; otherwise it is there and does not answer.
    """

    text: str
    dead: bool


class ReplicaSet:
    """The replicas, the trouble their processes are in, and who waits for them.

    Attributes:
        draining: new requests are refused.
    """

    def __init__(self, names: Sequence[str], can_recover: bool) -> None:
        self.replicas = [Replica(name) for name in names]
        self.draining = False
        self._can_recover = can_recover
        self._troubles: dict[str, _Trouble] = {}
        self._paused = False
        self._held = False
        self._waiting: set[asyncio.Future[None]] = set()

    def named(self, name: str) -> Replica | None:
        """Return a replica by the name of its process."""
        return next((replica for replica in self.replicas if replica.name == name), None)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas if replica.ready]

    @property
    def health(self) -> Health:
        """Whether requests are served, and what is wrong."""
        works = any(replica.ready and replica.name not in self._troubles for replica in self.replicas)
        return Health(
            problems=(*[trouble.text for trouble in self._troubles.values()], *self._outdated),
            draining=self.draining,
            serving=works and DETOKENIZER not in self._troubles,
            paused=self._paused,
        )

    @property
    def num_held(self) -> int:
        """Prompts that wait here, for a replica or for the end of a pause."""
        return len(self._waiting)

    @property
    def why_unavailable(self) -> str:
        """Why no replica takes a request."""
        return "; ".join(self.health.problems) or "no replica of the model is ready"

    async def take(self, timeout_s: float | None) -> Replica:
        """Return the replica for the next request, waiting while all are paused or being started again.

        Raises:
            UnavailableError: none is up and none will be, the server is draining, or the time is over.
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
        """Note that a process takes messages."""
        self._troubles.pop(name, None)
        replica = self.named(name)
        if replica is not None:
            replica.ready = True
        self._wake()

    def died(self, name: str, reason: str) -> None:
        """Note that a process is gone."""
        self._troubles[name] = _Trouble(f"{name} died: {reason}", dead=True)
        replica = self.named(name)
        if replica is not None:
            replica.ready, replica.outdated, replica.load = False, False, None
        self._wake()

    def stuck(self, name: str, seconds: float) -> None:
        """Note that a process has not answered for a while."""
        self._troubles[name] = _Trouble(f"{name} has not moved for {seconds:.0f} s", dead=False)

    def moves(self, name: str) -> None:
        """Note that a process answers again."""
        if name in self._troubles and not self._troubles[name].dead:
            del self._troubles[name]

    def give_up(self) -> None:
        """Let waiting requests fail when nothing is up: nothing will be started again."""
        self._can_recover = False
        self._wake()

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        self._wake()

    def pause(self) -> None:
        """Keep new requests waiting."""
        self._paused = True

    def resume(self) -> None:
        """Let requests through again."""
        self._paused = False
        self._wake()

    def hold(self) -> None:
        """Keep new requests waiting until `release`, whether generation is paused or not."""
        self._held = True

    def release(self) -> None:
        """Let requests through again that `hold` keeps."""
        self._held = False
        self._wake()

    @property
    def up(self) -> list[Replica]:
        """The replicas that answer: those that take requests, and those whose weights are outdated."""
        return [replica for replica in self.replicas if replica.ready or replica.outdated]

    def outdate(self, name: str) -> None:
        """Note that a replica has other weights than it should; it takes no requests."""
        replica = self.named(name)
        if replica is not None:
            replica.ready, replica.outdated = False, True

    def renew(self, name: str) -> None:
        """Note that a replica that is up has the weights it should have."""
        replica = self.named(name)
        if replica is not None and replica.outdated:
            replica.ready, replica.outdated = True, False
            self._wake()

    @property
    def _outdated(self) -> list[str]:
        return [
            f"{replica.name} has other weights than it should: update them again"
            for replica in self.replicas
            if replica.outdated
        ]

    def _free_replica(self) -> Replica | None:
        if self.draining:
            raise UnavailableError("the server is shutting down")
        trouble = self._troubles.get(DETOKENIZER)
        detokenizer_is_up = trouble is None or not trouble.dead
        replica = choose_replica(self.replicas) if detokenizer_is_up else None
        if replica is None and not self._can_recover:
            raise UnavailableError(self.why_unavailable)
        # Only an update of weights brings these back, and during one requests are held.
        if not self._held and all(replica.outdated for replica in self.replicas):
            raise UnavailableError(self.why_unavailable)
        return None if self._paused or self._held else replica

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
