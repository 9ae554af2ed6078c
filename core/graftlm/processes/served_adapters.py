"""The adapters that clients may ask for, and that every replica has."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.adapters import adapter_not_found, check_adapter_name
from graftlm.errors import AdapterError, RequestError, UnavailableError
from graftlm.processes.calls import ProcessCalls, Send
from graftlm.processes.messages import Call
from graftlm.processes.replicas import ReplicaSet

__all__ = ["ServedAdapter", "ServedAdapters"]

#: The `call_id` of calls whose answer nobody waits for: it is below those of `ProcessCalls`.
_UNHEARD_ID = -1


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that clients may ask for.

    Attributes:
        path: the folder it was read from.
        loaded_s: Unix time.
    """

    name: str
    path: str
    loaded_s: int


class ServedAdapters(Mapping[str, ServedAdapter]):
    """Loads adapters into all replicas, or into none, and knows which there are, by name. Lives in one event loop.

    Args:
        configured: name -> folder of those that replicas load by themselves when they start.
        calls: questions to the replicas.
        send: queues a message for a replica.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        configured: Mapping[str, str],
        calls: ProcessCalls,
        replicas: ReplicaSet,
        send: Send,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._configured = dict(configured)
        self._calls = calls
        self._replicas = replicas
        self._send = send
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()  # one change at a time
        now_s = int(wall_clock())
        self._by_name = {name: ServedAdapter(name, path, now_s) for name, path in configured.items()}

    def __getitem__(self, name: str) -> ServedAdapter:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def paths(self) -> dict[str, str]:
        """The folder of each, by name."""
        return {name: adapter.path for name, adapter in self._by_name.items()}

    def check(self, name: str | None) -> None:
        """Check the adapter of a request; None asks for none.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        if name is not None and name not in self._by_name:
            raise adapter_not_found(name, self._by_name)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter into every replica, while requests go on.

        Raises:
            AdapterError: the name is taken, or is none.
            RequestError: a replica refuses it; then no replica has it.
            UnavailableError: no replica is up, or one dies or gives no answer.
        """
        async with self._lock:
            check_adapter_name(name)
            if name in self._by_name:
                raise AdapterError(f"an adapter {name!r} is loaded already, from {self[name].path}. Unload it first.")
            asked = await self._load_everywhere(name, path)
            self._by_name[name] = ServedAdapter(name, path, int(self._wall_clock()))
            for replica in self._replicas.ready:
                if replica.name not in asked:
                    self.restarted(replica.name)  # while the others were loading

    async def unload(self, name: str) -> int:
        """Take no more requests for an adapter; those under way end with it.

        Returns: how many are under way.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            UnavailableError: a replica gives no answer.
        """
        async with self._lock:
            self.check(name)
            del self._by_name[name]  # before anything is awaited: no request may slip in behind
            return int(sum(await self._calls.call_schedulers("unload_adapter", name=name)))

    def restarted(self, process: str) -> None:
        """Have a replica that was started again hold what the others hold, before its first request."""
        if self.paths != self._configured:
            self._send(process, Call(call_id=_UNHEARD_ID, name="set_adapters", arguments={"adapters": self.paths}))

    async def _load_everywhere(self, name: str, path: str) -> set[str]:
        """Load an adapter into the replicas that are up, all or none; returns their names."""
        ready = [replica.name for replica in self._replicas.ready]
        if not ready:
            raise UnavailableError(self._replicas.why_unavailable)
        loads = [self._calls.call(process, "load_adapter", name=name, path=path) for process in ready]
        outcomes: list[Any] = await asyncio.gather(*loads, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return set(ready)
        for process, outcome in zip(ready, outcomes, strict=True):
            if not isinstance(outcome, RequestError):  # those that died or said nothing may have it, too
                self._send(process, Call(call_id=_UNHEARD_ID, name="unload_adapter", arguments={"name": name}))
        raise failures[0]
