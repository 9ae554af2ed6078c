"""A daemon thread that runs tasks one after the other."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Worker"]


class Worker:
    """Runs tasks in the order in which they were submitted. Tasks must not raise.

    Unlike the thread of an executor, its thread is a daemon: a task that never returns does not prevent the interpreter
    from exiting.

    Attributes:
        num_done: number of tasks that have returned.
    """

    def __init__(self, name: str) -> None:
        self.num_done = 0
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task. It does not run if `end` was called before."""
        self._tasks.put(task)

    def end(self) -> None:
        """Wait until all queued tasks have returned, and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # so that its objects are freed before the next task arrives
            self.num_done += 1
