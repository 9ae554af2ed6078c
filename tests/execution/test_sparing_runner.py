"""Steps on one thread less while something computes beside them."""

import threading
from typing import Any

import pytest
import torch

from graftlm.execution.sparing_runner import SparingRunner
from graftlm.spare_core import SpareCore


class _CountingRunner:
    """Notes how many threads torch has for each step."""

    def __init__(self) -> None:
        self.num_threads: list[int] = []

    def run(self, plan: Any) -> Any:
        self.num_threads.append(torch.get_num_threads())
        return plan

    def launch(self, plan: Any) -> Any:
        return self.run(plan)


def _steps_of(num_threads: int, method: str) -> list[int]:
    """Run four steps, the middle two beside something, in a thread of their own; return the threads of each."""
    runner, spare_core = _CountingRunner(), SpareCore(lambda: 0.0, limit_s=1.0)
    step = getattr(SparingRunner(runner, spare_core), method)

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
def test_steps_have_one_thread_less_while_the_spare_core_is_taken(
    method: str, num_threads: int, expected: list[int]
) -> None:
    assert _steps_of(num_threads, method) == expected
