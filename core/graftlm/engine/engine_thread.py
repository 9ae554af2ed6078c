"""The thread that owns an engine's step loop, and the way in and out of it."""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from graftlm.errors import EngineClosedError, QueueFullError, RequestError
from graftlm.scheduling import CompletionId, Failure, Finish, Request, RequestUpdate
from graftlm.step_loop import StepLoop
from graftlm.types import FinishReason

__all__ = ["EngineThread", "UpdateSink"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Called in the engine's thread with each update of one request; must return at once.
UpdateSink = Callable[[RequestUpdate], None]


class EngineThread:
    """Runs the step loop while there is work, and sleeps otherwise.

    Everything that touches the scheduler runs here: other threads hand in calls, and hear of requests through sinks.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sinks: dict[CompletionId, UpdateSink] = {}
        self._alone: deque[Callable[[], None]] = deque()  # calls that wait until no request is left
        self._held: deque[Callable[[], None]] = deque()  # additions that wait for them
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="graftlm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function between two steps.

        Raises:
            EngineClosedError: the engine is closed.
        """
        if threading.current_thread() is self._thread:  # an observer asks: there is nobody else to answer
            done: Future[T] = Future()
            done.set_result(function())
            return done
        future, run = _task(function)
        self._put(run)
        return future

    def call_alone(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function when every request added before has ended; those added later wait for it.

        Raises:
            EngineClosedError: the engine is closed.
        """

        def unless_closing() -> T:
            if self._closing:
                raise EngineClosedError("this engine is closed")
            return function()

        future, run = _task(unless_closing)
        self._put(lambda: self._alone.append(run))
        return future

    def submit(self, groups: "list[list[tuple[Request, UpdateSink]]]") -> "Future[int]":
        """Add groups of requests between two steps, each group whole, in order, until the queue is full.

        Returns: how many groups were added. The future fails with QueueFullError when not even the first one was, and
            with any other RequestError that refuses one of them; then none has been added.
        """
        future, run = _task(lambda: self._add_groups(groups))
        self._put(lambda: self._held.append(run) if self._alone else run())
        return future

    def abort_all(self, reason: str) -> "Future[None]":
        """End every request that has been added."""
        return self.call(lambda: self._abort(list(self._sinks), reason))

    def abort(self, completion_ids: list[CompletionId], reason: str) -> "Future[None]":
        """End completions; unknown ids are ignored."""
        return self.call(lambda: self._abort(completion_ids, reason))

    def stop(self) -> None:
        """Have every request end as aborted, and the thread, without waiting for it. Safe in a garbage collection."""
        if not self._closing:
            self._closing = True
            self._calls.put(lambda: None)

    def close(self) -> None:
        """End every request as aborted, and the thread. May be called twice."""
        with self._lock:  # no call may slip in behind
            self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _add_groups(self, groups: list[list[tuple[Request, UpdateSink]]]) -> int:
        if self._closing:
            raise EngineClosedError("this engine is closed")
        added: list[CompletionId] = []
        for num_added, group in enumerate(groups):
            try:
                added += self._add(group)
            except QueueFullError:
                if num_added == 0:
                    raise
                return num_added
            except Exception:
                self._withdraw(added)
                raise
        return len(groups)

    def _add(self, group: list[tuple[Request, UpdateSink]]) -> list[CompletionId]:
        for request, _ in group:
            if request.request_id in self._sinks:
                raise RequestError(f"request id {request.request_id!r} is in use; give every request its own")
        self._loop.add([request for request, _ in group], self._wake)
        self._sinks.update({request.request_id: sink for request, sink in group})
        return [request.request_id for request, _ in group]

    def _withdraw(self, completion_ids: list[CompletionId]) -> None:
        """End requests that were added before a later one of the same call was refused."""
        for completion_id in completion_ids:
            del self._sinks[completion_id]
        self._abort(completion_ids, "a sibling was refused")

    def _wake(self) -> None:
        """Let the loop look again; called from any thread."""
        self._calls.put(lambda: None)

    def _abort(self, completion_ids: list[CompletionId], reason: str) -> None:
        for completion_id in completion_ids:
            self._loop.abort(completion_id, reason)
        self._deliver(self._loop.take_updates())  # now, so that the ids are free again

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_calls(self._loop.idle_s)
                self._deliver(self._loop.step())
                self._run_alone()
            self._abort(list(self._sinks), "the engine was closed")
        except BaseException as error:  # a bug of ours: every waiting caller gets an error
            logger.exception("the engine's loop ended")
            self._closing = True
            reason = f"the engine stopped: {type(error).__name__}: {error}"
            finish = Finish(FinishReason.ERROR, error=reason, failure=Failure.ENGINE)
            for completion_id in list(self._sinks):
                self._deliver([RequestUpdate(completion_id, finish=finish)])
        finally:
            self._take_calls(0.0)
            for run in (*self._alone, *self._held):  # they find the engine closed
                run()
            self._loop.close()
            atexit.unregister(self.close)

    def _run_alone(self) -> None:
        """Run the calls that waited for the last request to end, and then what waited for them."""
        while self._alone and not self._sinks:
            self._alone.popleft()()
        while self._held and not self._alone:
            self._held.popleft()()

    def _put(self, run: Callable[[], None]) -> None:
        with self._lock:  # no call may slip in behind the last one
            if self._closing:
                raise EngineClosedError("this engine is closed")
            self._calls.put(run)

    def _take_calls(self, wait_s: float | None) -> None:
        """Run the calls handed in; with none there, wait for one this long at most, or for ever."""
        try:
            if wait_s != 0.0:
                self._calls.get(timeout=wait_s)()
            while not self._calls.empty():  # nobody else takes any
                self._calls.get_nowait()()
        except Empty:
            return

    def _deliver(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            sink = self._sinks.get(update.request_id)
            if sink is None:
                continue
            if update.finish is not None:
                del self._sinks[update.request_id]
            sink(update)


def _task(function: Callable[[], T]) -> "tuple[Future[T], Callable[[], None]]":
    """Return the future of what a function returns or raises, and what runs it."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return  # whoever waited has left
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    return future, run
