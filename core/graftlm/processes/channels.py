"""One-way channels between processes, which use ZeroMQ push and pull sockets over `ipc://`."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from graftlm.processes.messages import AnyMessage, Message, decode, encode

__all__ = ["AsyncInbox", "Inbox", "Outbox", "deliver_all", "private_folder"]

#: Milliseconds for which a closed outbox still tries to deliver queued messages.
_LINGER_MS = 1000
#: Maximum length of an `ipc://` path.
_MAX_SOCKET_PATH = 100


def private_folder() -> Path:
    """Create a folder for sockets that only this user may access."""
    folder = Path(tempfile.mkdtemp(prefix="graftlm-"))  # mkdtemp sets the mode 0700
    if len(str(folder)) > _MAX_SOCKET_PATH - len("/scheduler-63-99999"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="graftlm-", dir="/tmp"))
    return folder


def deliver_all() -> None:
    """Close every channel in this process, and wait up to 1 s for the delivery of queued messages.

    `Outbox.close` does not wait, so queued messages would be lost if the process ended directly afterwards.
    """
    zmq.Context.instance().destroy(linger=_LINGER_MS)


class Outbox:
    """The sending end of a channel, used by one thread. Sending never blocks, because messages are queued.

    The queue has no explicit limit. The limit on running requests also bounds the number of messages.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue a message.

        Raises:
            MessageError: the message cannot be encoded.
        """
        self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self, *, deliver: bool = True) -> None:
        """Close this end.

        Args:
            deliver: whether queued messages are still delivered. Use False if the receiver is dead.
        """
        self._socket.close(linger=_LINGER_MS if deliver else 0)


class Inbox:
    """The receiving end of a channel, used by one thread. Other threads can wake this thread."""

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
        """Make the current or next call of `receive` return without waiting. Safe in every thread."""
        with suppress(BlockingIOError):  # the pipe is full, so `receive` returns in any case
            os.write(self._waker_end, b"w")

    def receive(self, wait_s: float | None) -> Iterator[AnyMessage]:
        """Yield the messages that have arrived.

        Args:
            wait_s: maximum number of seconds to wait for the first message; None for no limit.

        Raises:
            MessageError: a message cannot be decoded.
        """
        if wait_s != 0.0:
            # Rounded up: after a wait that is too short, the caller would find no work and only wait again.
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
    """The receiving end of a channel, used by an event loop."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)

    async def receive(self) -> AnyMessage:
        """Wait for the next message and return it.

        Raises:
            MessageError: the message cannot be decoded.
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
