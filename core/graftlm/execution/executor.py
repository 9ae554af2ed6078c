"""Executors, which run steps in the caller's thread, or in worker threads in parallel with the scheduler."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, NoReturn, Protocol, TypeVar

from graftlm.contracts import Outcome, StepExecutor
from graftlm.plan import StepPlan, StepResult

__all__ = [
    "InlineExecutor",
    "LaunchExecutor",
    "Launched",
    "Outcome",
    "Runner",
    "StepExecutor",
    "WorkerExecutor",
    "executor_for",
]

T = TypeVar("T")


class Launched(Protocol):
    """A step that was launched on the device.

    `LaunchExecutor` gets it from the runner, and waits for its result in a second thread.
    """

    def result(self) -> StepResult:
        """Wait for the device without holding the GIL."""
        ...


class Runner(Protocol):
    """Runs or launches steps; see `graftlm.execution.runner.ModelRunner`."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for it."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step on the device."""
        ...


def executor_for(runner: Runner, device_type: str, *, overlap: bool) -> StepExecutor:
    """Return the executor for a torch device type. With `overlap`, it runs steps in parallel with the scheduler."""
    if not overlap:
        return InlineExecutor(runner.run)
    return WorkerExecutor(runner.run) if device_type == "cpu" else LaunchExecutor(runner.launch)


class InlineExecutor(StepExecutor):
    """Runs each step before `submit` returns."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run

    def submit(self, plan: StepPlan) -> Outcome[StepResult]:
        """Run a step."""
        try:
            return _Settled(self._run(plan))
        except BaseException as error:  # `result` raises it
            return _Failed(error)

    def call(self, function: Callable[[], T]) -> Outcome[T]:
        """Run a function."""
        try:
            return _Settled(function())
        except BaseException as error:
            return _Failed(error)

    def close(self) -> None:
        """Do nothing, because no step runs between calls."""


class _Settled(Generic[T]):
    """The outcome of a finished call. Unlike a `Future`, it creates no locks, which saves microseconds."""

    def __init__(self, value: T) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> T:
        return self._value

    def exception(self, timeout: float | None = None) -> None:
        return None


class _Failed:
    """The outcome of a call that raised."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def result(self, timeout: float | None = None) -> NoReturn:
        raise self._error

    def exception(self, timeout: float | None = None) -> BaseException:
        return self._error


class WorkerExecutor(StepExecutor):
    """Runs steps in one worker thread, so that the scheduler plans the next step while the current one runs."""

    def __init__(self, run: Callable[[StepPlan], StepResult]) -> None:
        self._run = run
        self._worker = _Worker("graftlm-step")

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step for the worker."""
        future: Future[StepResult] = Future()
        self._worker.put(lambda: _run_into(future, lambda: self._run(plan)))
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function for the worker."""
        future: Future[T] = Future()
        self._worker.put(lambda: _run_into(future, function))
        return future

    def close(self) -> None:
        """Wait for the submitted steps and stop the worker."""
        self._worker.close()


class LaunchExecutor(StepExecutor):
    """Launches steps in one thread and waits for them in another: a GPU gets a step before the previous one ends."""

    def __init__(self, launch: Callable[[StepPlan], Launched]) -> None:
        self._launch = launch
        self._launcher = _Worker("graftlm-step")
        self._waiter = _Worker("graftlm-wait")

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step for the launching thread."""
        future: Future[StepResult] = Future()
        self._launcher.put(lambda: self._launch_into(future, plan))
        return future

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function for the launching thread. The thread first waits for all launched steps."""
        future: Future[T] = Future()
        self._launcher.put(lambda: self._call_into(future, function))
        return future

    def close(self) -> None:
        """Wait for the submitted steps and stop both threads."""
        self._launcher.close()
        self._waiter.close()

    def _launch_into(self, future: Future[StepResult], plan: StepPlan) -> None:
        try:
            launched = self._launch(plan)
        except BaseException as error:  # the future raises it
            future.set_exception(error)
        else:
            self._waiter.put(lambda: _run_into(future, launched.result))

    def _call_into(self, future: Future[T], function: Callable[[], T]) -> None:
        settled = threading.Event()
        self._waiter.put(settled.set)
        settled.wait()
        _run_into(future, function)


class _Worker:
    """A thread that runs the queued calls in order."""

    def __init__(self, name: str) -> None:
        self._work_items: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work_items.put(work)

    def close(self) -> None:
        """Finish the queued calls and stop the thread."""
        self._work_items.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (work := self._work_items.get()) is not None:
            work()


def _run_into(future: Future[T], function: Callable[[], T]) -> Future[T]:
    try:
        future.set_result(function())
    except BaseException as error:  # the future raises it
        future.set_exception(error)
    return future
