"""Where steps run: in the caller's thread, or in a worker beside the scheduler."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol

from graftlm.plan import StepPlan, StepResult

__all__ = ["InlineExecutor", "StepExecutor", "WorkerExecutor"]


class StepExecutor(Protocol):
    """Runs plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step; its error, if any, is in the future."""
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
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._run(plan))
        except BaseException as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Do nothing: no step is ever under way."""


class WorkerExecutor:
    """Runs steps in one worker thread, so that the scheduler plans the next while one runs."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run
        self._steps: SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="graftlm-step", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step for the worker."""
        future: Future[StepResult] = Future()
        self._steps.put((plan, future))
        return future

    def close(self) -> None:
        """Wait for steps under way and end the worker."""
        self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            plan, future = step
            try:
                future.set_result(self._run(plan))
            except BaseException as error:  # whoever waits for the step must hear of it
                future.set_exception(error)
