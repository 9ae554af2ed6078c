"""Steps on a CPU that leave a core to what computes beside them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from graftlm.execution.executor import Launched, Runner
from graftlm.plan import StepPlan, StepResult
from graftlm.runtime.spare_core import SpareCore

__all__ = ["SparingRunner"]

T = TypeVar("T")


class SparingRunner:
    """Runs steps on one thread less while the spare core is taken.

    A step's threads meet hundreds of times, and wait for the slowest each time. Where one of them shares its core, a
    step takes several times as long, whatever the priority of what it shares with: threads that wait give their core
    away, and Linux may put two of a step's threads on one core while an idle thread has the other. On one thread less,
    two cores take twice as long at most.

    Args:
        runner: runs the steps. All must be run by the same thread, since torch counts threads by thread.
    """

    def __init__(self, runner: Runner, spare_core: SpareCore) -> None:
        self._runner = runner
        self._spare_core = spare_core
        self._num_all: int | None = None  # threads to go back to

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step and wait for it."""
        self._choose_threads()
        return self._runner.run(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """Give a step to the device."""
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
    """Set how many threads torch has for this thread only.

    What torch sets holds for all threads that are yet to come, too. Those get what they would have got: another engine
    may be born beside this step, and no step may come that would set it back.
    """
    for_others = _in_new_thread(torch.get_num_threads)
    torch.set_num_threads(num_threads)
    _in_new_thread(lambda: torch.set_num_threads(for_others))


def _in_new_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()
