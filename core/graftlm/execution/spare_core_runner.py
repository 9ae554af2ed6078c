"""Runs CPU steps with fewer threads while another computation uses a core."""

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
    """Runs steps on one thread fewer while the spare core is in use.

    The threads of a step synchronise hundreds of times, and each time all wait for the slowest thread. If one of them
    shares its core with another computation, the step takes several times as long, for all priorities: waiting threads
    yield their core, and Linux may then put two threads of the step on one core. With one thread fewer, a step on two
    cores takes at most twice as long.

    Args:
        runner: runs the steps. The same thread must run all of them, because torch's thread count is per thread.
    """

    def __init__(self, runner: Runner, spare_core: SpareCore) -> None:
        self._runner = runner
        self._spare_core = spare_core
        self._num_all: int | None = None  # thread count to restore

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

    torch applies the count to all later threads of the process too. This function restores their count, because another
    engine may start during this step, and there may be no later step that would restore it.
    """
    for_others = _in_new_thread(torch.get_num_threads)
    torch.set_num_threads(num_threads)
    _in_new_thread(lambda: torch.set_num_threads(for_others))


def _in_new_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()
