"""Starts jobs in the engine's thread, waits for their end, and aborts them."""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

from graftlm.engine.engine_thread import EngineThread
from graftlm.engine.jobs import Job, JobStream, group_of
from graftlm.errors import EngineClosedError, QueueFullError
from graftlm.progress import progress_bar
from graftlm.scheduling import RequestUpdate
from graftlm.types import RequestOutput

__all__ = ["JobRunner"]


class JobRunner:
    """Runs jobs, for callers in threads and in event loops.

    Args:
        thread: the engine's thread.
        max_queued: maximum number of requests that may wait in the engine's queue.
    """

    def __init__(self, thread: EngineThread, max_queued: int) -> None:
        self._thread = thread
        self._max_queued = max_queued
        self._started: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()

    def abort(self, request_id: str) -> None:
        """Abort a job. Unknown ids are ignored."""
        job = self._started.get(request_id)
        if job is not None:
            self._abort_jobs([job])

    def stream(self, job: Job) -> Iterator[RequestOutput]:
        """Start a job; return an iterator of outputs. Each output contains all tokens so far."""
        events: SimpleQueue[bool] = SimpleQueue()
        self._thread.submit([group_of(job, lambda update: events.put(job.add(update)))]).result()
        self._register([job])
        return JobStream(job, events, self._abort_jobs)

    async def astream(self, job: Job) -> AsyncGenerator[RequestOutput, None]:
        """Start a job and yield outputs, each with all tokens so far. Closing the generator aborts the job."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def sink(update: RequestUpdate) -> None:
            job.add(update)
            _call_in_loop(loop, changed.set)

        await self._added(self._thread.submit([group_of(job, sink)]), [job])
        finished = False
        try:
            while not finished:
                await changed.wait()
                changed.clear()
                output = job.output()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort_jobs([job])

    async def start(self, job: Job) -> None:
        """Start a job, and return when it is queued, without waiting for its end."""
        await self._added(self._thread.submit([group_of(job, lambda update: None)]), [job])

    def run(self, jobs: list[Job], progress: bool | None) -> None:
        """Start jobs while the queue has room for them, and wait until all have ended.

        Args:
            progress: see `Engine.generate`.
        """
        finished: SimpleQueue[Job] = SimpleQueue()
        waiting = deque(jobs)
        num_left, num_running = len(jobs), 0
        try:
            with progress_bar(len(jobs), progress) as advance:
                while num_left:
                    num_running += self._start_some(waiting, finished, num_running)
                    finished.get()
                    num_running -= 1
                    num_left -= 1
                    advance()
        finally:
            if num_left:
                self._abort_jobs(jobs[: len(jobs) - len(waiting)])

    async def arun(self, jobs: list[Job]) -> None:
        """Start all jobs together, and wait until all have ended. Cancelling the call aborts them.

        Raises:
            QueueFullError: the queue does not have room for all jobs; all of them are then aborted.
        """
        loop = asyncio.get_running_loop()
        all_done = asyncio.Event()
        num_left = len(jobs)

        def one_done() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                all_done.set()

        def sink_of(job: Job) -> Callable[[RequestUpdate], None]:
            return lambda update: _call_in_loop(loop, one_done) if job.add(update) else None

        num_added = 0
        try:
            if jobs:
                num_added = await self._added(self._thread.submit([group_of(job, sink_of(job)) for job in jobs]), jobs)
                if num_added < len(jobs):
                    limit = self._max_queued
                    raise QueueFullError(
                        f"{len(jobs)} prompts exceed the maximum of {limit} waiting requests; use `generate`"
                    )
                await all_done.wait()
        finally:
            if num_left:
                self._abort_jobs(jobs[:num_added])

    def _start_some(self, waiting: "deque[Job]", finished: "SimpleQueue[Job]", num_running: int) -> int:
        """Start jobs until the queue is full. Return their number.

        Raises:
            QueueFullError: the queue is full, and no job of this call is running.
        """
        room = self._max_queued - num_running
        jobs = [waiting[i] for i in range(min(room, len(waiting)))]
        if not jobs:
            return 0
        groups = [group_of(job, partial(_put_when_done, finished, job)) for job in jobs]
        try:
            num_started = self._thread.submit(groups).result()
        except QueueFullError:
            if num_running == 0:
                raise
            return 0  # requests of other callers fill the queue; the next try follows when a job of this call has ended
        self._register([waiting.popleft() for _ in range(num_started)])
        return num_started

    async def _added(self, submitted: "Future[int]", jobs: list[Job]) -> int:
        """Wait until jobs are in the engine's queue, and return their number. Abort them if the wait is cancelled."""
        try:
            num_added = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            self._abort_jobs(jobs)
            raise
        self._register(jobs[:num_added])
        return num_added

    def _abort_jobs(self, jobs: list[Job]) -> None:
        try:
            self._thread.abort([request.request_id for job in jobs for request in job.requests], "aborted")
        except EngineClosedError:
            return  # the engine has aborted all requests

    def _register(self, jobs: list[Job]) -> None:
        """Add jobs to the table that `abort` uses."""
        self._started.update({job.builder.request_id: job for job in jobs})


def _put_when_done(finished: "SimpleQueue[Job]", job: Job, update: RequestUpdate) -> None:
    if job.add(update):
        finished.put(job)


def _call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run a callback in an event loop. If the loop is closed, do nothing: no task can wait in it."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
