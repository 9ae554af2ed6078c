"""The open HTTP connections: how many there may be, and how long each may wait for its client."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

__all__ = ["Connection", "ConnectionLimits", "ConnectionTable", "Phase"]

#: A body has this many more bytes for each second beyond `stall_timeout_s`.
_MIN_BODY_BYTES_PER_S: Final = 1024


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "the first byte of another request"
    HEAD = "the end of a request's header fields"
    BODY = "the end of a request's body"
    STALLED = "a client that reads its answer slowly or not at all"
    ANSWER = "the server"
    CLOSING = "a client that has yet to read the end of its last answer"


#: In these the client has to read.
_UNREAD: Final = (Phase.STALLED, Phase.CLOSING)
#: These connections are closed for a new one, the oldest of the first kind first.
_EVICTABLE: Final = (Phase.CLOSING, Phase.BODY, Phase.STALLED)


class Connection(Protocol):
    """A connection as the table uses it."""

    @property
    def body_bytes(self) -> int:
        """Bytes of the current request's body that have come."""

    @property
    def is_held(self) -> bool:
        """Whether the server does not read from the client at the moment."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the operating system has not taken yet."""

    def expire(self, phase: Phase) -> None:
        """End a connection that was too long in a phase."""

    def abort(self) -> None:
        """Close at once, without another byte."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may take.

    Attributes:
        max_connections: open at once.
        max_header_bytes: of the request line with all header fields; of the trailer fields; of a chunk's extensions.
        header_timeout_s: from a connection's opening, or a request's first byte, to the end of its header fields.
        stall_timeout_s: a body may take as long, and a second more for each KiB that came; a client may take as long
            without reading anything of its answer.
    """

    max_connections: int = 1024
    max_header_bytes: int = 65536
    header_timeout_s: float = 15.0
    stall_timeout_s: float = 30.0


class ConnectionTable:
    """Knows the phase of every connection, evicts one when a new one needs its place, and ends those that are late.

    Belongs to the event loop's thread.

    Args:
        clock: seconds; never goes back.
    """

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._phases: dict[Connection, Phase] = {}
        # By phase: connection -> when it entered, the oldest first.
        self._since: dict[Phase, dict[Connection, float]] = {phase: {} for phase in Phase}
        # Of each connection in STALLED or CLOSING: its `unsent_bytes` when it entered, or at the last sweep.
        self._unsent: dict[Connection, int] = {}

    def __len__(self) -> int:
        return len(self._phases)

    def admit(self, connection: Connection) -> bool:
        """Take in a new connection, which waits for a request's header fields.

        Effects: when there are too many, one is aborted for it: the oldest without a request or in its header fields;
        if there is none, one whose client has to read the end of an answer (CLOSING), to send the rest of a body or to
        read more of an answer (STALLED), in this order.

        Returns: False when the server works for all others (ANSWER); then it is not taken in.
        """
        if len(self._phases) >= self.limits.max_connections:
            evicted = self._to_evict()
            if evicted is None:
                return False
            self.forget(evicted)
            evicted.abort()
        self._enter(connection, Phase.HEAD)
        return True

    def move(self, connection: Connection, phase: Phase) -> None:
        """Note what a connection waits for from now on; the time in a phase goes on when it is the same."""
        before = self._phases.get(connection)
        if before is None or before is phase:
            return
        self._leave(connection, before)
        self._enter(connection, phase)

    def forget(self, connection: Connection) -> None:
        """Note that a connection is closed."""
        phase = self._phases.pop(connection, None)
        if phase is not None:
            self._leave(connection, phase)

    def sweep(self) -> None:
        """End the connections that are late."""
        now_s, limits = self._clock(), self.limits
        for connection, since_s in list(self._since[Phase.HEAD].items()):
            if now_s - since_s < limits.header_timeout_s:
                break  # the others are younger
            connection.expire(Phase.HEAD)
        for connection, since_s in list(self._since[Phase.BODY].items()):
            if connection.is_held:
                self._since[Phase.BODY][connection] = now_s
            elif now_s - since_s >= limits.stall_timeout_s + connection.body_bytes / _MIN_BODY_BYTES_PER_S:
                connection.expire(Phase.BODY)
        for phase in _UNREAD:
            for connection, since_s in list(self._since[phase].items()):
                if connection.unsent_bytes < self._unsent[connection]:
                    self._leave(connection, phase)
                    self._enter(connection, phase)
                    continue
                self._unsent[connection] = connection.unsent_bytes
                if now_s - since_s >= limits.stall_timeout_s:
                    connection.expire(phase)

    async def run(self) -> None:
        """Sweep until cancelled."""
        interval_s = min(1.0, self.limits.header_timeout_s / 4, self.limits.stall_timeout_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            self.sweep()

    def _enter(self, connection: Connection, phase: Phase) -> None:
        self._phases[connection] = phase
        self._since[phase][connection] = self._clock()
        if phase in _UNREAD:
            self._unsent[connection] = connection.unsent_bytes

    def _leave(self, connection: Connection, phase: Phase) -> None:
        del self._since[phase][connection]
        self._unsent.pop(connection, None)

    def _to_evict(self) -> Connection | None:
        waiting = [next(iter(self._since[phase].items()), None) for phase in (Phase.IDLE, Phase.HEAD)]
        oldest = min((it for it in waiting if it is not None), key=lambda it: it[1], default=None)
        if oldest is not None:
            return oldest[0]
        return next((connection for phase in _EVICTABLE for connection in self._since[phase]), None)
