"""Questions of the main process to the others, and their answers."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftlm.errors import RequestError, UnavailableError
from graftlm.processes.messages import PING_ID, Call, Message, Reply
from graftlm.processes.replicas import ReplicaSet

__all__ = ["ProcessCalls", "Send"]

#: How long an answer to a Call may take.
CALL_TIMEOUT_S = 60.0

#: Queues a message for a process by name; dropped when it is down.
Send = Callable[[str, Message], None]


class ProcessCalls:
    """Calls that wait for their answers. Lives in one event loop."""

    def __init__(self, replicas: ReplicaSet, send: Send) -> None:
        self._replicas = replicas
        self._send = send
        self._counter = itertools.count(PING_ID + 1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    async def call(self, process: str, name: str, /, **arguments: Any) -> Any:
        """Call one process and return its answer.

        Raises:
            UnavailableError: it is down, dies or gives no answer.
            RequestError: it refuses.
        """
        return await self._ask(process, name, arguments, CALL_TIMEOUT_S)

    async def call_each(
        self, processes: Sequence[str], name: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        """Call processes at once, and return by their names the answers, or the errors as `call` raises them."""
        calls = [self._ask(process, name, arguments, timeout_s) for process in processes]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        return dict(zip(processes, outcomes, strict=True))

    async def _ask(self, process: str, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
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
        """Call every replica that is up and return their answers.

        Raises:
            UnavailableError: none is up, or one dies or gives no answer.
            RequestError: one refuses.
        """
        ready = self._replicas.ready
        if not ready:
            raise UnavailableError(self._replicas.why_unavailable)
        return list(await asyncio.gather(*[self.call(replica.name, name, **arguments) for replica in ready]))

    async def call_those_that_stay(self, name: str, /, **arguments: Any) -> None:
        """Call every replica that is up; one that dies meanwhile will not be missed, since it starts again unpaused.

        Raises:
            UnavailableError: one is up and gives no answer.
        """
        ready = self._replicas.ready
        calls = [self.call(replica.name, name, **arguments) for replica in ready]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for replica, outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, BaseException) and replica.ready:
                raise outcome

    def answer(self, reply: Reply) -> None:
        """Take in an answer; one that nobody waits for any more is ignored."""
        _, future = self._waiting.get(reply.call_id, (None, None))
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(RequestError(reply.error))

    def process_died(self, name: str, text: str) -> None:
        """Fail what a dead process was asked, with a text that says so."""
        for process, future in list(self._waiting.values()):
            if process == name and not future.done():
                future.set_exception(UnavailableError(text))
