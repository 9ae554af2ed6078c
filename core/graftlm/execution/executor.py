"""Where steps run: in the caller's thread, or in a worker beside the scheduler."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol, TypeVar

from graftlm.plan import StepPlan, StepResult

__all__ = ["InlineExecutor", "StepExecutor", "WorkerExecutor"]

T = TypeVar("T")


class StepExecutor(Protocol):
    """Runs plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step; its error, if any, is in the future."""
        ...

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function in the thread that runs the steps, after those under way."""
        ...

    def close(self) -> None:
        """Wait for steps under way and stop."""
        ...


class InlineExecutor:
    """Runs each step before `submit` returns."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Run a step."""
        return _run_into(Future(), lambda: self._run(plan))

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Run a function."""
        return _run_into(Future(), function)

    def close(self) -> None:
        """Do nothing: no step is ever under way."""


class WorkerExecutor:
    """Runs steps in one worker thread, so that the scheduler plans the next while one runs."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run
        self._work_items: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="graftlm-step", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step for the worker."""
        future: Future[StepResult] = Future()
        self._work_items.put(lambda: _run_into(future, lambda: self._run(plan)))
        return future

    def call(self, function: Callable[[], None]) -> Future[None]:
        """Queue a function for the worker."""
        future: Future[None] = Future()
        self._work_items.put(lambda: _run_into(future, function))
        return future

    def close(self) -> None:
        """Wait for steps under way and end the worker."""
        self._work_items.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._work_items.get()) is not None:
            work()


def _run_into(future: Future[T], function: Callable[[], T]) -> Future[T]:
    try:
        future.set_result(function())
    except BaseException as error:  # whoever waits must hear of it
        future.set_exception(error)
    return future
