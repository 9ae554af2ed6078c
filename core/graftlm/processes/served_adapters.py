"""The adapters that clients may ask for, and that every replica has."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graftlm.errors import AdapterError, RequestError, UnavailableError
from graftlm.lora.adapters import adapter_not_found, check_adapter_name
from graftlm.processes.calls import CALL_TIMEOUT_S, ProcessCalls, Send
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
        digest: of its content, the same in every replica; None if no replica has told.
    """

    name: str
    path: str
    loaded_s: int
    digest: str | None = None


class ServedAdapters(Mapping[str, ServedAdapter]):
    """Loads adapters into all replicas, or into none, and knows which there are, by name. Lives in one event loop.

    Args:
        configured: name -> folder of those that replicas load by themselves when the server starts.
        digests: of their content, by name.
        calls: questions to the replicas.
        send: queues a message for a replica.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        configured: Mapping[str, str],
        digests: Mapping[str, str],
        calls: ProcessCalls,
        replicas: ReplicaSet,
        send: Send,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._calls = calls
        self._replicas = replicas
        self._send = send
        self._wall_clock = wall_clock
        self._lock = asyncio.Lock()  # one change at a time
        now_s = int(wall_clock())
        self._by_name = {name: ServedAdapter(name, path, now_s, digests.get(name)) for name, path in configured.items()}

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
            AdapterError: the name is taken, or is none; or replicas read different contents, then no replica has it.
            RequestError: a replica refuses it; then no replica has it.
            UnavailableError: no replica is up, or one dies or gives no answer.
        """
        async with self._lock:
            check_adapter_name(name)
            if name in self._by_name:
                raise AdapterError(f"an adapter {name!r} is already loaded from {self[name].path}. Unload it first.")
            asked, digest = await self._load_everywhere(name, path)
            self._by_name[name] = ServedAdapter(name, path, int(self._wall_clock()), digest)
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
        """Have a replica that was started hold what the others hold, with that content, before its first request."""
        if self._by_name:
            wanted = {name: {"path": it.path, "digest": it.digest} for name, it in self._by_name.items()}
            self._send(process, Call(call_id=_UNHEARD_ID, name="set_adapters", arguments={"adapters": wanted}))

    async def _load_everywhere(self, name: str, path: str) -> tuple[set[str], str]:
        """Load an adapter into the replicas that are up, all or none; returns their names and what they have read."""
        ready = [replica.name for replica in self._replicas.ready]
        if not ready:
            raise UnavailableError(self._replicas.why_unavailable)
        try:
            arguments = {"name": name, "path": path}
            outcomes = await self._calls.call_each(ready, "load_adapter", arguments, CALL_TIMEOUT_S)
            digests = _digests(outcomes)
            if len(digests) > 1:
                raise AdapterError(
                    f"the replicas have read {len(digests)} different adapters from {path}. Load it again when nothing "
                    "is written there, and every replica finds the same files."
                )
        except (AdapterError, asyncio.CancelledError):
            self._forget(name, ready)
            raise
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, BaseException)]
        if failures:
            # Those that died or said nothing may have it, too; one that still reads lets go of it.
            self._forget(name, [process for process in ready if not isinstance(outcomes[process], RequestError)])
            raise failures[0]
        (digest,) = digests
        return set(ready), digest

    def _forget(self, name: str, processes: Iterable[str]) -> None:
        for process in processes:
            self._send(process, Call(call_id=_UNHEARD_ID, name="unload_adapter", arguments={"name": name}))


def _digests(outcomes: Mapping[str, Any]) -> set[str]:
    return {outcome for outcome in outcomes.values() if not isinstance(outcome, BaseException)}
