"""Calls from the main process to the other processes, and their replies."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftlm.errors import RequestError, UnavailableError
from graftlm.processes.messages import PING_ID, Call, Message, Reply
from graftlm.processes.replicas import ReplicaSet

__all__ = ["ProcessCalls", "Send"]

#: Seconds to wait for the reply to a Call.
CALL_TIMEOUT_S = 60.0

#: Queues a message for the process with a given name. The message is dropped if the process is not running.
Send = Callable[[str, Message], None]


class ProcessCalls:
    """Calls functions of the replicas' processes, and waits for the replies. All methods run in one event loop."""

    def __init__(self, replicas: ReplicaSet, send: Send) -> None:
        self._replicas = replicas
        self._send = send
        self._counter = itertools.count(PING_ID + 1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    async def call(self, process: str, name: str, /, **arguments: Any) -> Any:
        """Call one process and return the value of its reply.

        Args:
            process: name of the process.
            name: name of the call.
            arguments: arguments of the call.

        Raises:
            UnavailableError: the process is not running, dies, or does not reply in time.
            RequestError: the process refuses the call.
        """
        return await self._call(process, name, arguments, CALL_TIMEOUT_S)

    async def call_each(
        self, processes: Sequence[str], name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Call several processes concurrently.

        Returns: name of the process -> value of its reply, or the exception that `call` would raise.
        """
        calls = [self._call(process, name, arguments, timeout_s) for process in processes]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return dict(zip(processes, outcomes, strict=True))

    async def _call(self, process: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        call_id = next(self._counter)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (process, future)
        self._send(process, Call(call_id=call_id, name=name, arguments=dict(arguments)))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise UnavailableError(f"{process} did not answer {name!r} within {timeout_s:.0f} s") from None
        finally:
            del self._waiting[call_id]

    async def call_schedulers(self, name: str, /, **arguments: Any) -> list[Any]:
        """Call every ready replica and return the values of the replies.

        Raises:
            UnavailableError: no replica is ready, or one dies or does not reply in time.
            RequestError: a replica refuses the call.
        """
        ready = self._replicas.ready
        if not ready:
            raise UnavailableError(self._replicas.why_unavailable)
        return list(await asyncio.gather(*[self.call(replica.name, name, **arguments) for replica in ready]))

    async def call_surviving(self, name: str, /, **arguments: Any) -> None:
        """Call every replica whose process runs, and ignore errors of replicas that die during the call.

        Raises:
            UnavailableError: a replica that still runs does not reply in time.
            RequestError: a replica that still runs refuses the call.
        """
        called = self._replicas.up
        calls = [self.call(replica.name, name, **arguments) for replica in called]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for replica, outcome in zip(called, outcomes, strict=True):
            if isinstance(outcome, BaseException) and replica in self._replicas.up:
                raise outcome

    def answer(self, reply: Reply) -> None:
        """Pass a reply to its caller. The reply is ignored if the caller no longer waits."""
        _, future = self._waiting.get(reply.call_id, (None, None))
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(RequestError(reply.error))

    def process_died(self, name: str, text: str) -> None:
        """Fail the unanswered calls of a dead process with an error that has this text."""
        for process, future in list(self._waiting.values()):
            if process == name and not future.done():
                future.set_exception(UnavailableError(text))
