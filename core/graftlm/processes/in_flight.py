"""The prompts under way in the main process, found by the names that clients and processes know them by."""

from collections.abc import Iterator
from dataclasses import dataclass

from graftlm.processes.generation import Generation
from graftlm.processes.replicas import Replica

__all__ = ["InFlight", "InFlightRequests"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One prompt, where it runs, and when it was last heard of.

    Attributes:
        wire_id: its name among the processes, never used twice; a client may use its own name again.
        arrived_s, heard_s: of the monotonic clock; heard_s is None until the first token.
    """

    wire_id: str
    generation: Generation
    replica: Replica
    arrived_s: float
    heard_s: float | None = None


class InFlightRequests:
    """The prompts that have not ended."""

    def __init__(self) -> None:
        self._by_wire_id: dict[str, InFlight] = {}
        self._by_sub_id: dict[str, InFlight] = {}
        self._by_request_id: dict[str, InFlight] = {}

    def __len__(self) -> int:
        return len(self._by_wire_id)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(list(self._by_wire_id.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_request_id

    def by_wire_id(self, wire_id: str) -> InFlight | None:
        """Return a prompt by its name among the processes."""
        return self._by_wire_id.get(wire_id)

    def by_sub_id(self, sub_id: str) -> InFlight | None:
        """Return the prompt of a completion."""
        return self._by_sub_id.get(sub_id)

    def by_request_id(self, request_id: str) -> InFlight | None:
        """Return a prompt by the client's name."""
        return self._by_request_id.get(request_id)

    def add(self, item: InFlight) -> None:
        """Take a prompt in."""
        self._by_wire_id[item.wire_id] = item
        self._by_request_id[item.generation.request_id] = item
        for sub_id in item.generation.sub_ids:
            self._by_sub_id[sub_id] = item
        item.replica.num_requests += 1
        item.replica.queued_tokens += len(item.generation.request.prompt_token_ids)

    def first_heard(self, item: InFlight, now_s: float) -> None:
        """Note that a prompt has shown its first token: it no longer queues."""
        item.heard_s = now_s
        item.replica.queued_tokens -= len(item.generation.request.prompt_token_ids)

    def remove(self, item: InFlight) -> bool:
        """Take a prompt out; False when it is out already."""
        if self._by_wire_id.pop(item.wire_id, None) is None:
            return False
        del self._by_request_id[item.generation.request_id]
        for sub_id in item.generation.sub_ids:
            del self._by_sub_id[sub_id]
        item.replica.num_requests -= 1
        if item.heard_s is None:
            item.replica.queued_tokens -= len(item.generation.request.prompt_token_ids)
        return True
