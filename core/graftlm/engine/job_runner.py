"""Jobs on their way through the engine: started, waited for, given up."""

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
    """Runs jobs, for callers that wait in a thread and for those in an event loop.

    Args:
        thread: the engine's.
        max_queued: requests that may wait at a time.
    """

    def __init__(self, thread: EngineThread, max_queued: int) -> None:
        self._thread = thread
        self._max_queued = max_queued
        self._live: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()

    def abort(self, request_id: str) -> None:
        """End a job; unknown ids are ignored."""
        job = self._live.get(request_id)
        if job is not None:
            self._abort_jobs([job])

    def stream(self, job: Job) -> Iterator[RequestOutput]:
        """Start a job, and return its growing outputs."""
        events: SimpleQueue[bool] = SimpleQueue()
        self._thread.submit([group_of(job, lambda update: events.put(job.take(update)))]).result()
        self._remember([job])
        return JobStream(job, events, self._abort_jobs)

    async def astream(self, job: Job) -> AsyncGenerator[RequestOutput, None]:
        """Start a job, and yield its growing outputs."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def sink(update: RequestUpdate) -> None:
            job.take(update)
            _wake(loop, news.set)

        await self._entered(self._thread.submit([group_of(job, sink)]), [job])
        finished = False
        try:
            while not finished:
                await news.wait()
                news.clear()
                output = job.output()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort_jobs([job])

    async def start(self, job: Job) -> None:
        """Start a job that nobody waits for; returns when it is queued."""
        await self._entered(self._thread.submit([group_of(job, lambda update: None)]), [job])

    def run(self, jobs: list[Job], progress: bool | None) -> None:
        """Start jobs as the queue has room, and wait for all."""
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
        """Start jobs at once, all or none, and wait for all."""
        loop = asyncio.get_running_loop()
        all_done = asyncio.Event()
        num_left = len(jobs)

        def one_done() -> None:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                all_done.set()

        def sink_of(job: Job) -> Callable[[RequestUpdate], None]:
            return lambda update: _wake(loop, one_done) if job.take(update) else None

        num_added = 0
        try:
            if jobs:
                num_added = await self._entered(
                    self._thread.submit([group_of(job, sink_of(job)) for job in jobs]), jobs
                )
                if num_added < len(jobs):
                    limit = self._max_queued
                    raise QueueFullError(f"{len(jobs)} prompts do not fit into a queue of {limit}; use `generate`")
                await all_done.wait()
        finally:
            if num_left:
                self._abort_jobs(jobs[:num_added])

    def _start_some(self, waiting: "deque[Job]", finished: "SimpleQueue[Job]", num_running: int) -> int:
        """Start jobs until the queue is full; returns how many. With none under way, a full queue is an error."""
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
            return 0  # others fill the queue as well; go on when one of ours is done
        self._remember([waiting.popleft() for _ in range(num_started)])
        return num_started

    async def _entered(self, submitted: "Future[int]", jobs: list[Job]) -> int:
        """Wait until jobs have entered the engine, and have them aborted if the wait is cancelled."""
        try:
            num_added = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            self._abort_jobs(jobs)
            raise
        self._remember(jobs[:num_added])
        return num_added

    def _abort_jobs(self, jobs: list[Job]) -> None:
        try:
            self._thread.abort([request.request_id for job in jobs for request in job.requests], "aborted")
        except EngineClosedError:
            return  # closing has ended them

    def _remember(self, jobs: list[Job]) -> None:
        """Let `abort` find jobs that have started."""
        self._live.update({job.builder.request_id: job for job in jobs})


def _put_when_done(finished: "SimpleQueue[Job]", job: Job, update: RequestUpdate) -> None:
    if job.take(update):
        finished.put(job)


def _wake(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run a callback in an event loop; a loop that has been closed has nobody waiting in it."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
