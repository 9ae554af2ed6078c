"""The weights of the replicas, and their replacement while the server runs."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from graftlm.errors import UnavailableError
from graftlm.processes.calls import ProcessCalls
from graftlm.processes.in_flight import InFlightRequests
from graftlm.processes.replicas import ReplicaSet

__all__ = ["ServedWeights"]

#: Time limit in seconds for a replica to replace its weights, which may be read from slow storage.
UPDATE_TIMEOUT_S: Final = 3600.0


class ServedWeights:
    """Replaces the weights of all replicas. Updates do not run concurrently. Used in one event loop.

    Args:
        calls: calls functions of the replicas.
        in_flight: the prompts that have not ended. An update waits for their end.
        abort_all: aborts every prompt in flight.

    Attributes:
        lock: held during each update, and by other calls that must not run during an update.
        version: name of the weights in answers; "default" until an update sets another name.
        path: path of the checkpoint that the last update loaded; None if no update has loaded a checkpoint.
    """

    def __init__(
        self, calls: ProcessCalls, replicas: ReplicaSet, in_flight: InFlightRequests, abort_all: Callable[[], None]
    ) -> None:
        self.version = "default"
        self.path: str | None = None
        self._calls = calls
        self._replicas = replicas
        self._in_flight = in_flight
        self._abort_all = abort_all
        self.lock = asyncio.Lock()
        self._have_changed = False
        self._are_dropped = False

    async def update(
        self,
        path: str | None,
        tensors: bytes | None,
        *,
        flush_cache: bool,
        abort_all: bool,
        version: str | None,
        received: Mapping[str, object] | None = None,
    ) -> int:
        """Replace the weights in every replica. Running requests end first. New requests wait until the update ends.

        While generation is paused, the update does not wait for requests. After `resume`, paused requests are computed
        again, or continue with their keys and values if `flush_cache` is False.

        Args:
            path: path of a checkpoint, or None.
            tensors: the content of a safetensors file, or None.
            received: name -> arguments of `map_tensors` for tensors in shared memory, or None.
            flush_cache: whether to discard the keys and values that the former weights computed.
            abort_all: whether to abort running requests instead of waiting for them.
            version: name of the new weights in answers; None keeps the name.

        Returns: number of prompts that were paused during the update.

        Raises:
            RequestError: the weights do not fit the model; every replica keeps its weights.
            UnavailableError: no replica runs, or only some replicas could load the new weights. In the second case,
                the remaining replicas serve no requests until an update succeeds.
        """
        arguments: dict[str, object] = {"path": path, "tensors": tensors, "flush_cache": flush_cache}
        if received is not None:
            arguments["received"] = received
        async with self.lock:
            self._replicas.hold()
            try:
                if abort_all:
                    self._abort_all()
                if abort_all or not self._replicas.health.paused:
                    await self._in_flight.wait_until_empty()
                num_paused = len(self._in_flight)
                processes = [replica.name for replica in self._replicas.up]
                outcomes = await self._calls.call_each(processes, "update_weights", arguments, UPDATE_TIMEOUT_S)
                self._record(outcomes, version)
                self.path = path or self.path
            finally:
                self._replicas.release()
        return num_paused

    @property
    def are_dropped(self) -> bool:
        """Whether the weights were dropped, and no replica has all weights since."""
        return self._are_dropped

    def note_dropped(self) -> None:
        """Record that all replicas have dropped their weights. They accept no requests until an update is complete."""
        self._are_dropped = self._have_changed = True
        for replica in self._replicas.up:
            self.note_lacking(replica.name, "the weights were dropped; load new ones for the whole model")

    def note_lacking(self, name: str, reason: str) -> None:
        """Record that a replica cannot run requests before more weights are loaded."""
        self._have_changed = True
        self._replicas.mark_outdated(name, f"lacks weights: {reason}")

    def process_ready(self, name: str) -> None:
        """Handle the start of a replica. It is marked as outdated if an update has replaced the configured weights."""
        if self._have_changed:
            self._replicas.mark_outdated(name)

    def _record(self, outcomes: Mapping[str, object], version: str | None) -> None:
        """Record which replicas have the new weights, and their version. Raises the errors of `update`."""
        if not outcomes:
            raise UnavailableError(self._replicas.why_unavailable)
        failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, BaseException)}
        if len(failed) == len(outcomes):
            raise next(iter(failed.values()))
        self._have_changed = True
        self.version = version or self.version
        for replica in self._replicas.up:
            outcome = outcomes.get(replica.name)
            if isinstance(outcome, str):
                self.note_lacking(replica.name, outcome)
            elif replica.name in outcomes and replica.name not in failed:
                self._are_dropped = False
                self._replicas.mark_current(replica.name)
            else:  # the update of this replica failed, or the replica was restarted during the update
                self._replicas.mark_outdated(replica.name)
        if failed:
            reasons = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise UnavailableError(
                f"{len(outcomes) - len(failed)} of {len(outcomes)} replicas have the new weights. The other "
                f"replicas serve no requests until an update succeeds: {reasons}"
            )
