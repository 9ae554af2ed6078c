"""The record of one running prompt in the in-process engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

from graftlm.engine.engine_thread import UpdateSink
from graftlm.outputs import CompletionText, OutputBuilder
from graftlm.scheduling import CompletionId, Request, RequestUpdate
from graftlm.types import RequestOutput

__all__ = ["Job", "JobStream", "group_of"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """One running prompt.

    Attributes:
        builder: collects the output.
        texts: completion id -> the state of the completion's text.
        requests: one request for each completion.
        updates: updates that are not yet in the output.
        num_unfinished: number of completions that have not ended.
    """

    builder: OutputBuilder
    texts: dict[CompletionId, CompletionText]
    requests: list[Request]
    updates: list[RequestUpdate] = field(default_factory=list)
    num_unfinished: int = 0

    def __post_init__(self) -> None:
        self.num_unfinished = len(self.requests)

    def add(self, update: RequestUpdate) -> bool:
        """Store an update. Return whether it was the job's last one. Called in the engine's thread."""
        self.updates.append(update)
        self.num_unfinished -= update.finish is not None
        return self.num_unfinished == 0

    def output(self) -> RequestOutput:
        """Return the output so far. Called in the caller's thread, which also detokenizes the tokens."""
        updates, self.updates = self.updates, []
        for update in updates:
            self.builder.apply(update, self.texts[update.request_id].push(update))
        return self.builder.output()


class JobStream(Iterator[RequestOutput]):
    """An iterator of the outputs of one job. If it is closed or garbage-collected early, the job is aborted."""

    def __init__(self, job: Job, events: "SimpleQueue[bool]", abort: Callable[[list[Job]], None]) -> None:
        self._job = job
        self._events = events
        self._abort = abort
        self._ended = False

    def __next__(self) -> RequestOutput:
        if self._ended:
            raise StopIteration
        finished = self._events.get()
        while not finished and not self._events.empty():
            finished = self._events.get()
        self._ended = finished
        return self._job.output()

    def close(self) -> None:
        """Abort the request if it has not ended."""
        if not self._ended:
            self._ended = True
            self._abort([self._job])

    def __del__(self) -> None:
        self.close()


def group_of(job: Job, sink: UpdateSink) -> list[tuple[Request, UpdateSink]]:
    """Return a job's requests, each with the sink of its updates, as a group for `EngineThread.submit`."""
    return [(request, sink) for request in job.requests]
