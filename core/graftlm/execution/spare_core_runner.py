"""Runs CPU steps with one thread fewer while another computation uses a core."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from graftlm.execution.executor import Launched, Runner
from graftlm.plan import StepPlan, StepResult
from graftlm.runtime.spare_core import SpareCore

__all__ = ["SpareCoreRunner"]

T = TypeVar("T")


class SpareCoreRunner:
    """A runner that uses one thread fewer for steps while the spare core is taken.

    The threads of a step synchronise hundreds of times, and each time all threads wait for the slowest one. If one
    thread shares its core with another computation, the step takes several times as long, whatever the computation's
    priority: waiting threads yield their core, and Linux may then put two threads of the step on one core. With one
    thread fewer, a step on two cores takes at most twice as long.

    Args:
        runner: runs the steps. The same thread must run all steps, because torch's thread count is per thread.
    """

    def __init__(self, runner: Runner, spare_core: SpareCore) -> None:
        self._runner = runner
        self._spare_core = spare_core
        self._num_all: int | None = None  # torch's thread count without a spare core

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for its result."""
        self._choose_threads()
        return self._runner.run(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step on the device."""
        self._choose_threads()
        return self._runner.launch(plan)

    def _choose_threads(self) -> None:
        is_taken = self._spare_core.is_taken
        if is_taken and self._num_all is None:
            self._num_all = torch.get_num_threads()
            _set_own_threads(max(1, self._num_all - 1))
        elif not is_taken and self._num_all is not None:
            _set_own_threads(self._num_all)
            self._num_all = None


def _set_own_threads(num_threads: int) -> None:
    """Set torch's thread count for the calling thread only.

    torch also applies the count to all threads that the process starts later. This function restores their count
    immediately, because another engine may start during this step.
    """
    for_others = _in_new_thread(torch.get_num_threads)
    torch.set_num_threads(num_threads)
    _in_new_thread(lambda: torch.set_num_threads(for_others))


def _in_new_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()
