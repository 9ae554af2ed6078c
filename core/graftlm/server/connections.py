"""Limits on the number of open HTTP connections, and on the time for which a connection may wait for its client."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

__all__ = ["Connection", "ConnectionLimits", "ConnectionTable", "Phase"]

#: Minimum average rate at which a body must arrive after the first `stall_timeout_s` seconds.
_MIN_BODY_BYTES_PER_S: Final = 1024


class Phase(Enum):
    """The event or the party for which a connection waits."""

    IDLE = "the first byte of another request"
    HEAD = "the end of a request's header fields"
    BODY = "the end of a request's body"
    STALLED = "a client that reads its answer slowly or not at all"
    ANSWER = "the server"
    CLOSING = "a client that has yet to read the end of its last answer"


#: Phases in which the server waits for the client to read.
_UNREAD: Final = (Phase.STALLED, Phase.CLOSING)
#: Connections in these phases may be closed to admit a new connection. The phases are tried in this order, and in each
#: phase the oldest connection first.
_EVICTABLE: Final = (Phase.CLOSING, Phase.BODY, Phase.STALLED)


class Connection(Protocol):
    """The part of a connection that the table uses."""

    @property
    def body_bytes(self) -> int:
        """Number of bytes of the current request's body that have arrived."""

    @property
    def is_read_paused(self) -> bool:
        """Whether the server has paused reading from the client."""

    @property
    def unsent_bytes(self) -> int:
        """Number of bytes of answers that the operating system has not accepted yet."""

    def expire(self, phase: Phase) -> None:
        """End a connection that was in a phase for too long."""

    def abort(self) -> None:
        """Close the connection immediately, and send no more bytes."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on the connections, bytes and seconds that clients may use.

    Attributes:
        max_connections: maximum number of connections that are open at the same time.
        max_header_bytes: maximum number of bytes in the request line with all header fields. The same limit applies
            to the trailer fields, and to the extensions of one chunk.
        header_timeout_s: maximum number of seconds until the header fields are complete, counted from the opening of
            the connection or from the first byte of a later request.
        stall_timeout_s: maximum number of seconds for receiving a body. Each KiB that has arrived adds one second. This
            is also the maximum number of seconds for which a client may read nothing of its answer.
    """

    max_connections: int = 1024
    max_header_bytes: int = 65536
    header_timeout_s: float = 15.0
    stall_timeout_s: float = 30.0


class ConnectionTable:
    """Records the phase of every connection, and ends connections that exceed a time limit.

    If the table is full, it may close an old connection to admit a new one.

    All methods are called in the event loop's thread.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._phases: dict[Connection, Phase] = {}
        # phase -> {connection: time at which it entered the phase}, the oldest first
        self._since: dict[Phase, dict[Connection, float]] = {phase: {} for phase in Phase}
        # connection in STALLED or CLOSING -> its `unsent_bytes` at the last sweep, or when it entered the phase
        self._unsent: dict[Connection, int] = {}

    def __len__(self) -> int:
        return len(self._phases)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection, which waits for the header fields of a request (HEAD).

        Effects: if the table is full, another connection is aborted: the oldest one in IDLE or HEAD. If there is none,
            it is the oldest one in CLOSING, else in BODY, else in STALLED.

        Returns: whether the connection was added. It is not added if the table is full and all connections are in
            ANSWER.
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
        """Record the phase of a connection. If the phase is unchanged, the time limit is not restarted."""
        before = self._phases.get(connection)
        if before is None or before is phase:
            return
        self._leave(connection, before)
        self._enter(connection, phase)

    def forget(self, connection: Connection) -> None:
        """Remove a connection that is closed."""
        phase = self._phases.pop(connection, None)
        if phase is not None:
            self._leave(connection, phase)

    def sweep(self) -> None:
        """End the connections that exceed their time limit."""
        now_s, limits = self._clock(), self.limits
        for connection, since_s in list(self._since[Phase.HEAD].items()):
            if now_s - since_s < limits.header_timeout_s:
                break  # the remaining connections entered the phase later
            connection.expire(Phase.HEAD)
        for connection, since_s in list(self._since[Phase.BODY].items()):
            if connection.is_read_paused:
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
        """Sweep periodically until the task is cancelled."""
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
