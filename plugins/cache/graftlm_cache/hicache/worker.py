"""A thread that does one task after the other, and that nobody has to wait for."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["Worker"]


class Worker:
    """Runs tasks in the order they were handed in. Tasks do not raise.

    Unlike an executor's, its thread is daemonic: a task that never returns keeps no interpreter from ending.

    Attributes:
        num_done: tasks that have returned.
    """

    def __init__(self, name: str) -> None:
        self.num_done = 0
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task after those before; never, if `end` was called."""
        self._tasks.put(task)

    def end(self) -> None:
        """Wait until all tasks have returned, and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it holds may go while nothing comes
            self.num_done += 1
