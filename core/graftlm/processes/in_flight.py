"""The main process's table of running prompts, with lookup by request id, prompt id or completion id."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from graftlm.processes.generation import Generation
from graftlm.processes.messages import PromptId
from graftlm.processes.prompt_traces import PromptTrace
from graftlm.processes.replicas import Replica
from graftlm.routing import Route
from graftlm.scheduling import CompletionId

__all__ = ["InFlight", "InFlightRequests"]


@dataclass(slots=True, eq=False)
class InFlight:
    """One prompt that has not ended, and its replica.

    Attributes:
        route: the prompt as the router sees it.
        arrived_s: time of the prompt's arrival, in seconds of the monotonic clock.
        last_token_s: time at which its latest tokens arrived, on the same clock; None before the first token.
        trace: receives the end of the prompt; None if the request is not traced.
    """

    prompt_id: PromptId
    generation: Generation
    replica: Replica
    route: Route
    arrived_s: float
    last_token_s: float | None = None
    trace: PromptTrace | None = None


class InFlightRequests:
    """The prompts that have not ended."""

    def __init__(self) -> None:
        self._by_prompt_id: dict[PromptId, InFlight] = {}
        self._by_completion_id: dict[CompletionId, InFlight] = {}
        self._by_request_id: dict[str, InFlight] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._by_prompt_id)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(list(self._by_prompt_id.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_request_id

    def by_prompt_id(self, prompt_id: PromptId) -> InFlight | None:
        """Return the prompt with the prompt id `prompt_id`; None if it is not in flight."""
        return self._by_prompt_id.get(prompt_id)

    def by_completion_id(self, completion_id: CompletionId) -> InFlight | None:
        """Return the prompt of a completion; None if it is not in flight."""
        return self._by_completion_id.get(completion_id)

    def by_request_id(self, request_id: str) -> InFlight | None:
        """Return the prompt with the client's id `request_id`; None if it is not in flight."""
        return self._by_request_id.get(request_id)

    def add(self, item: InFlight) -> None:
        """Add a prompt, and add it to the counts of its replica."""
        self._is_empty.clear()
        self._by_prompt_id[item.prompt_id] = item
        self._by_request_id[item.generation.request_id] = item
        for completion_id in item.generation.completion_ids:
            self._by_completion_id[completion_id] = item
        item.replica.sent(item.route)

    def first_token(self, item: InFlight, now_s: float) -> None:
        """Record a prompt's first token. The prompt no longer counts as queued in its replica."""
        item.last_token_s = now_s
        item.replica.started(item.route)

    def remove(self, item: InFlight) -> bool:
        """Remove a prompt, and return whether it was in the table."""
        if self._by_prompt_id.pop(item.prompt_id, None) is None:
            return False
        del self._by_request_id[item.generation.request_id]
        for completion_id in item.generation.completion_ids:
            del self._by_completion_id[completion_id]
        item.replica.ended(item.route, item.generation.num_output_tokens)
        if not self._by_prompt_id:
            self._is_empty.set()
        return True

    async def wait_until_empty(self) -> None:
        """Wait until every prompt has ended."""
        await self._is_empty.wait()
