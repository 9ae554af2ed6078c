"""One-way channels between processes: ZeroMQ push and pull over `ipc://`."""

import os
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from graftlm.processes.messages import AnyMessage, Message, decode, encode

__all__ = ["AsyncInbox", "Inbox", "Outbox", "deliver_all"]

#: How long a closing end tries to deliver what is queued.
_LINGER_MS = 1000


def deliver_all() -> None:
    """Close every end in this process, and wait a while until what is queued has been delivered.

    Closing an `Outbox` does not wait, so what is left in it is lost when the process ends at once.
    """
    zmq.Context.instance().destroy(linger=_LINGER_MS)


class Outbox:
    """The sending end, in one thread. Never blocks: what the receiver has not taken yet is queued without a limit.

    What is queued is bounded by what the requests under way may still produce.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue a message.

        Raises:
            MessageError: it cannot be written.
        """
        self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self, *, deliver: bool = True) -> None:
        """Close this end; `deliver` what is queued, or drop it because nobody is there."""
        self._socket.close(linger=_LINGER_MS if deliver else 0)


class Inbox:
    """The receiving end, in one thread, which other threads can wake."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._wake_end, self._waker_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        os.set_blocking(self._waker_end, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_end, zmq.POLLIN)

    def wake(self) -> None:
        """Have `receive` return, now or when it is next called. Safe in every thread."""
        with suppress(BlockingIOError):  # it is full of wakes that have not been seen
            os.write(self._waker_end, b"w")

    def receive(self, wait_s: float | None) -> Iterator[AnyMessage]:
        """Yield the messages that are there; with none there, wait for one this long at most, or for ever.

        Raises:
            MessageError: a message cannot be read.
        """
        if wait_s != 0.0:
            # Rounded up: waking a moment too early would find nothing to do, and wait again.
            events = self._poller.poll(None if wait_s is None else int(wait_s * 1000) + 1)
            if len(events) and self._wake_end in dict(events):
                os.read(self._wake_end, 4096)
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode(data)

    def close(self) -> None:
        """Close this end."""
        self._socket.close(linger=0)
        os.close(self._wake_end)
        os.close(self._waker_end)


class AsyncInbox:
    """The receiving end in an event loop."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)

    async def receive(self) -> AnyMessage:
        """Return the next message.

        Raises:
            MessageError: it cannot be read.
        """
        return decode(await self._socket.recv())

    def close(self) -> None:
        """Close this end."""
        self._socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
