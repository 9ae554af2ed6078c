"""The adapters that every replica has loaded and that requests may name."""

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

#: The `call_id` of calls whose reply is ignored. `ProcessCalls` uses higher ids.
_IGNORED_REPLY_ID = -1


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that requests may name.

    Attributes:
        name: name of the adapter in requests.
        path: the folder from which the adapter was read.
        loaded_s: Unix time at which the adapter was loaded, in seconds.
        digest: digest of the content, the same in every replica; None if no replica has reported it.
    """

    name: str
    path: str
    loaded_s: int
    digest: str | None = None


class ServedAdapters(Mapping[str, ServedAdapter]):
    """The loaded adapters by name. An adapter is loaded into all replicas or into none.

    All methods are called in one event loop.

    Args:
        configured: name -> folder of the adapters that each replica loads at the server's start.
        digests: name -> digest of the content of each configured adapter.
        calls: calls functions of the replicas.
        replicas: the replicas.
        send: queues a message for a replica.
        wall_clock: returns Unix time in seconds.
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
        self._lock = asyncio.Lock()  # prevents concurrent loads and unloads
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
        """Name -> folder of each adapter."""
        return {name: adapter.path for name, adapter in self._by_name.items()}

    def check(self, name: str | None) -> None:
        """Check the name of the adapter in a request; None means the model without an adapter.

        Raises:
            AdapterNotFoundError: there is no such adapter.
        """
        if name is not None and name not in self._by_name:
            raise adapter_not_found(name, self._by_name)

    async def load(self, name: str, path: str) -> None:
        """Load an adapter into every replica, while requests run. If this fails, no replica keeps the adapter.

        Raises:
            AdapterError: the name is in use or not valid, or the replicas read different contents.
            RequestError: a replica refuses the adapter.
            UnavailableError: no replica is ready, or one dies or does not reply in time.
        """
        async with self._lock:
            check_adapter_name(name)
            if name in self._by_name:
                raise AdapterError(f"an adapter {name!r} is already loaded from {self[name].path}. Unload it first.")
            processes, digest = await self._load_everywhere(name, path)
            self._by_name[name] = ServedAdapter(name, path, int(self._wall_clock()), digest)
            for replica in self._replicas.ready:
                if replica.name not in processes:  # the replica was restarted during the load
                    self.restarted(replica.name)

    async def unload(self, name: str) -> int:
        """Refuse new requests for an adapter. Running requests use it until they end.

        Returns: the number of requests that still use the adapter.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            UnavailableError: no replica is ready, or one dies or does not reply in time.
        """
        async with self._lock:
            self.check(name)
            del self._by_name[name]  # must precede the first await, because requests can arrive during an await
            return int(sum(await self._calls.call_schedulers("unload_adapter", name=name)))

    def restarted(self, process: str) -> None:
        """Make a restarted replica load all adapters of the other replicas before its first request."""
        if self._by_name:
            adapters = {name: {"path": it.path, "digest": it.digest} for name, it in self._by_name.items()}
            arguments = {"adapters": adapters}
            self._send(process, Call(call_id=_IGNORED_REPLY_ID, name="set_adapters", arguments=arguments))

    async def _load_everywhere(self, name: str, path: str) -> tuple[set[str], str]:
        """Load an adapter into all ready replicas, or into none. Raises the errors of `load`.

        Returns: the names of the processes that have loaded the adapter, and the digest of the adapter's content.
        """
        ready = [replica.name for replica in self._replicas.ready]
        if not ready:
            raise UnavailableError(self._replicas.why_unavailable)
        try:
            arguments = {"name": name, "path": path}
            outcomes = await self._calls.call_each(ready, "load_adapter", arguments, CALL_TIMEOUT_S)
            digests = _digests(outcomes)
            if len(digests) > 1:
                raise AdapterError(
                    f"the replicas have read {len(digests)} different adapters from {path}. Load the adapter again "
                    "when its files no longer change and are the same for every replica."
                )
        except (AdapterError, asyncio.CancelledError):
            self._unload_from(name, ready)
            raise
        failures = [outcome for outcome in outcomes.values() if isinstance(outcome, BaseException)]
        if failures:
            # Replicas that did not reply may also have loaded the adapter. Replicas that are still reading the adapter
            # will not install it.
            loaded = [process for process in ready if not isinstance(outcomes[process], RequestError)]
            self._unload_from(name, loaded)
            raise failures[0]
        (digest,) = digests
        return set(ready), digest

    def _unload_from(self, name: str, processes: Iterable[str]) -> None:
        for process in processes:
            self._send(process, Call(call_id=_IGNORED_REPLY_ID, name="unload_adapter", arguments={"name": name}))


def _digests(outcomes: Mapping[str, Any]) -> set[str]:
    return {outcome for outcome in outcomes.values() if not isinstance(outcome, BaseException)}
