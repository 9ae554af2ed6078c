"""The thread that runs an engine's step loop, and executes calls of other threads between steps."""

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from graftlm.errors import EngineClosedError, QueueFullError, RankFailedError, RequestError
from graftlm.scheduling import CompletionId, Failure, Finish, Request, RequestUpdate
from graftlm.step_loop import StepLoop
from graftlm.types import FinishReason

__all__ = ["EngineThread", "UpdateSink"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Function that is called in the engine's thread with each update of one request. It must not block.
UpdateSink = Callable[[RequestUpdate], None]


class EngineThread:
    """Runs the step loop while there is work, and otherwise waits for calls.

    Only this thread uses the scheduler. Other threads pass functions to this thread. A sink receives each update of a
    request.
    """

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sinks: dict[CompletionId, UpdateSink] = {}
        self._exclusive: deque[Callable[[], None]] = deque()  # calls that wait until all requests have ended
        self._held: deque[Callable[[], None]] = deque()  # submissions that wait for the exclusive calls
        self._closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="graftlm-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function in the engine's thread between two steps.

        Raises:
            EngineClosedError: the engine is closed.
        """
        if threading.current_thread() is self._thread:  # an observer's call; a wait would never end
            done: Future[T] = Future()
            done.set_result(function())
            return done
        future, run = _task(function)
        self._put(run)
        return future

    def call_exclusive(self, function: Callable[[], T]) -> "Future[T]":
        """Run a function when all earlier requests have ended. Later requests wait until the function has returned.

        Raises:
            EngineClosedError: the engine is closed.
        """

        def unless_closing() -> T:
            if self._closing:
                raise EngineClosedError("this engine is closed")
            return function()

        future, run = _task(unless_closing)
        self._put(lambda: self._exclusive.append(run))
        return future

    def submit(self, groups: "list[list[tuple[Request, UpdateSink]]]") -> "Future[int]":
        """Add groups of requests between two steps, in order, until the queue is full. Each group is added as a whole.

        Returns: a future of the number of groups that were added. It fails with QueueFullError if there is no room for
            the first group. It fails with another RequestError if a request is refused; no group is then added.

        Raises:
            EngineClosedError: the engine is closed.
        """
        future, run = _task(lambda: self._add_groups(groups))
        self._put(lambda: self._held.append(run) if self._exclusive else run())
        return future

    def abort_all(self, reason: str) -> "Future[None]":
        """Abort every request that has been added."""
        return self.call(lambda: self._abort(list(self._sinks), reason))

    def abort(self, completion_ids: list[CompletionId], reason: str) -> "Future[None]":
        """Abort completions. Unknown ids are ignored."""
        return self.call(lambda: self._abort(completion_ids, reason))

    def stop(self) -> None:
        """Let the thread abort every request and end; do not wait for it. May be called in garbage collection."""
        if not self._closing:
            self._closing = True
            self._calls.put(lambda: None)

    def close(self) -> None:
        """Abort every request, and wait until the thread has ended. A further call has no effect."""
        with self._lock:  # a call that is queued after the last one would never run
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
                self._remove(added)
                raise
        return len(groups)

    def _add(self, group: list[tuple[Request, UpdateSink]]) -> list[CompletionId]:
        for request, _ in group:
            if request.request_id in self._sinks:
                raise RequestError(f"request id {request.request_id!r} is in use; give every request a different id")
        self._loop.add([request for request, _ in group], self._wake)
        self._sinks.update({request.request_id: sink for request, sink in group})
        return [request.request_id for request, _ in group]

    def _remove(self, completion_ids: list[CompletionId]) -> None:
        """Abort requests because a later request of the same call was refused."""
        for completion_id in completion_ids:
            del self._sinks[completion_id]
        self._abort(completion_ids, "another request of the same call was refused")

    def _wake(self) -> None:
        """Wake the thread if it waits for calls. May be called from any thread."""
        self._calls.put(lambda: None)

    def _abort(self, completion_ids: list[CompletionId], reason: str) -> None:
        for completion_id in completion_ids:
            self._loop.abort(completion_id, reason)
        self._deliver(self._loop.take_updates())  # immediately, so that the ids can be used again

    def _run(self) -> None:
        try:
            self._loop.when_executor_fails(self._wake)
            while not self._closing:
                self._run_calls(self._loop.idle_s)
                self._deliver(self._loop.step())
                self._loop.check_executor()
                self._run_exclusive()
            self._abort(list(self._sinks), "the engine was closed")
        except BaseException as error:  # a bug in graftlm: every waiting caller gets an error
            logger.error("the engine's loop ended", exc_info=None if isinstance(error, RankFailedError) else error)
            self._closing = True
            reason = f"the engine stopped: {type(error).__name__}: {error}"
            finish = Finish(FinishReason.ERROR, error=reason, failure=Failure.ENGINE)
            for completion_id in list(self._sinks):
                self._deliver([RequestUpdate(completion_id, finish=finish)])
        finally:
            self._run_calls(0.0)
            for run in (*self._exclusive, *self._held):  # they fail with EngineClosedError
                run()
            self._loop.close()
            atexit.unregister(self.close)

    def _run_exclusive(self) -> None:
        """If all requests have ended, run the exclusive calls, and then the submissions that waited for these calls."""
        while self._exclusive and not self._sinks:
            self._exclusive.popleft()()
        while self._held and not self._exclusive:
            self._held.popleft()()

    def _put(self, run: Callable[[], None]) -> None:
        with self._lock:  # a call that is queued after the last one would never run
            if self._closing:
                raise EngineClosedError("this engine is closed")
            self._calls.put(run)

    def _run_calls(self, wait_s: float | None) -> None:
        """Run the queued calls. Wait up to `wait_s` seconds for the first call; None: without a limit."""
        try:
            if wait_s != 0.0:
                self._calls.get(timeout=wait_s)()
            while not self._calls.empty():  # no other thread takes calls from the queue
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
    """Return a future, and a function that calls `function` and sets the future to its result."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return  # the caller has cancelled it
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    return future, run
