"""The unfinished requests."""

from collections import Counter
from collections.abc import Callable, Iterator

from graftlm.scheduling.compiling_grammars import CompilingGrammars
from graftlm.scheduling.prefetches import Prefetches
from graftlm.scheduling.queue import WaitingQueue
from graftlm.scheduling.request import Request, RequestStatus
from graftlm.scheduling.running import RunningRequests
from graftlm.scheduling.updates import Failure, Finish, RequestUpdate
from graftlm.types import FinishReason, TokenLogprob

__all__ = ["LiveRequests"]


class LiveRequests:
    """The requests between `add` and `finish`, and their updates.

    Attributes:
        updates: the updates since the last `take_updates`, in order.
        num_finished: number of requests that finished since the start.
        num_prompt_tokens: number of prompt tokens of all requests since the start.
    """

    def __init__(
        self,
        running: RunningRequests,
        queue: WaitingQueue,
        grammars: CompilingGrammars,
        prefetches: Prefetches,
        clock: Callable[[], float],
    ) -> None:
        self.updates: list[RequestUpdate] = []
        self.num_finished = 0
        self.num_prompt_tokens = 0
        self._running = running
        self._queue = queue
        self._grammars = grammars
        self._prefetches = prefetches
        self._clock = clock
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def used_adapter_slots(self) -> Counter[int]:
        """Number of requests per adapter slot; requests without an adapter are not counted."""
        return Counter(request.adapter.slot for request in self if request.adapter is not None)

    def get(self, request_id: str) -> Request | None:
        """Return the request with an id; None if the id is unknown or the request has finished."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._prefetches.begin(request)
        self._requests[request.request_id] = request
        self._queue.add(request)
        self._grammars.add(request)
        self.num_prompt_tokens += request.prompt_len

    def finish(
        self,
        request: Request,
        finish: Finish,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        embedding: bytes | None = None,
    ) -> None:
        """End a request.

        Effects: removes the request from its row or from the queue, and appends its last update. Its computed tokens
            stay cached.
        """
        if request.row is not None:
            self._running.release(request)
        elif request.status is RequestStatus.WAITING:
            self._queue.remove(request)
        self._end(request, finish, token_ids, logprobs, embedding)

    def fail(self, request: Request, error: str, failure: Failure = Failure.ENGINE) -> None:
        """End a request with an error; see `finish`."""
        self.finish(request, Finish(FinishReason.ERROR, error=error, failure=failure))

    def fail_without_row(self, request: Request, error: str) -> None:
        """End a request with an error after all rows were cleared; the request may still be in the queue."""
        self._queue.discard(request)
        self._end(request, Finish(FinishReason.ERROR, error=error, failure=Failure.ENGINE))

    def take_updates(self) -> list[RequestUpdate]:
        """Return the updates since the last call."""
        updates, self.updates = self.updates, []
        return updates

    def _end(
        self,
        request: Request,
        finish: Finish,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        embedding: bytes | None = None,
    ) -> None:
        request.status, request.finished_s = RequestStatus.FINISHED, self._clock()
        del self._requests[request.request_id]
        self._prefetches.release()
        self._grammars.leave(request)
        self.num_finished += 1
        self.updates.append(RequestUpdate.of(request, token_ids, logprobs, finish=finish, embedding=embedding))
