"""Steps with one thread fewer while another computation uses the spare core."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from graftlm.execution.spare_core_runner import SpareCoreRunner
from graftlm.runtime.spare_core import SpareCore


class _CountingRunner:
    """Records torch's thread count at each step."""

    def __init__(self) -> None:
        self.num_threads: list[int] = []

    def run(self, plan: Any) -> Any:
        self.num_threads.append(torch.get_num_threads())
        return plan

    def launch(self, plan: Any) -> Any:
        return self.run(plan)


def _steps_of(num_threads: int, method: str) -> list[int]:
    """Run four steps in a new thread, the middle two with the spare core in use; return the thread count of each."""
    runner, spare_core = _CountingRunner(), SpareCore(lambda: 0.0, limit_s=1.0)
    step = getattr(SpareCoreRunner(runner, spare_core), method)

    def steps() -> None:
        torch.set_num_threads(num_threads)
        step("before")
        with spare_core.taken():
            step("beside")
            step("beside")
        step("after")

    before = torch.get_num_threads()
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    return runner.num_threads


@pytest.mark.parametrize("method", ["run", "launch"])
@pytest.mark.parametrize(("num_threads", "expected"), [(3, [3, 2, 2, 3]), (2, [2, 1, 1, 2]), (1, [1, 1, 1, 1])])
def test_steps_use_one_thread_fewer_while_the_spare_core_is_in_use(
    method: str, num_threads: int, expected: list[int]
) -> None:
    assert _steps_of(num_threads, method) == expected


def _num_threads_of_new_threads() -> int:
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(torch.get_num_threads).result()


@pytest.mark.parametrize("set_meanwhile", [None, 5])
def test_the_thread_count_of_other_threads_is_unchanged(set_meanwhile: int | None) -> None:
    """Threads that start during such a step, or after the last step, which no later step restores."""
    spare_core = SpareCore(lambda: 0.0, limit_s=1.0)
    runner = SpareCoreRunner(_CountingRunner(), spare_core)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(max_workers=1) as steps:
            with spare_core.taken():
                steps.submit(runner.run, cast(Any, "beside")).result()
                assert _num_threads_of_new_threads() == 3
                if set_meanwhile is not None:
                    torch.set_num_threads(set_meanwhile)
            steps.submit(runner.run, cast(Any, "after")).result()
            assert steps.submit(torch.get_num_threads).result() == 3
        assert _num_threads_of_new_threads() == torch.get_num_threads() == (set_meanwhile or 3)
    finally:
        torch.set_num_threads(before)
