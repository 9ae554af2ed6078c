"""The conformance kit of executors, which run fake ranks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final
from unittest import SkipTest

import numpy as np
import psutil

from graftlm.contracts import ExecutorCapabilities, ExecutorContext, StepExecutor
from graftlm.errors import ConfigError, RankFailedError
from graftlm.testing.conformance import Conformance
from graftlm.testing.fake_ranks import FAULTS, fake_executor, fake_plan

__all__ = ["ExecutorConformance"]

#: Deadline of steps in tests of faults, and the maximum time until the error is raised.
_TIMEOUT_S: Final = 1.0
_LIMIT_S: Final = 10.0


class ExecutorConformance(Conformance, ABC):
    """The kit for the contract `StepExecutor`.

        class TestMyExecutor(ExecutorConformance):
            capabilities = ExecutorCapabilities()

            def create(self, context):
                return context.run_on(MyProcesses(context.launches))

    Attributes:
        capabilities: the provider's capabilities.
        parameters: `num_ranks` is the number of ranks; `rank` is the rank that fails, and `fault` how.
    """

    capabilities: ExecutorCapabilities = ExecutorCapabilities()
    parameters: ClassVar[Mapping[str, Sequence[Any]]] = {
        "num_ranks": (1, 2, 3),
        "rank": (0, 1),
        "fault": tuple(FAULTS),
    }

    @abstractmethod
    def create(self, context: ExecutorContext) -> StepExecutor:
        """Return a new executor."""

    def _start(self, num_ranks: int, **settings: Any) -> StepExecutor:
        most = self.capabilities.max_ranks
        if most is not None and num_ranks > most:
            raise SkipTest(f"the executor runs at most {most} ranks")
        return fake_executor(num_ranks, self.create, **settings)

    def test_plans_run_in_their_order(self, num_ranks: int) -> None:
        """Every plan runs once on every rank, in the order of `submit`; the outcome has the result of rank 0."""
        executor = self._start(num_ranks)
        try:
            outcomes = [executor.submit(fake_plan(step_id, 10 * step_id)) for step_id in range(4)]
            for step_id, outcome in enumerate(outcomes):
                result = outcome.result()
                assert result.token_ids.tolist() == [10 * step_id * num_ranks]
                assert result.pooled[0].tolist() == list(range(step_id + 1)), "a plan ran twice, late or not at all"
                assert outcome.exception() is None
                assert outcome.result() is result, "a second call of result() returned another result"
        finally:
            executor.close()

    def test_masks_may_follow(self, num_ranks: int) -> None:
        """A plan may have a token mask that is filled after `submit`, also while the next plan is submitted."""
        executor = self._start(num_ranks)
        try:
            plans = [fake_plan(0, num_masks=2), fake_plan(1, num_masks=1)]
            outcomes = [executor.submit(plan) for plan in plans]
            for plan, bits in zip(plans, ([[1], [5]], [[7]]), strict=True):
                assert plan.token_mask is not None
                plan.token_mask.bits.set_result(np.array(bits, dtype=np.int32))
            assert [outcome.result().token_ids.tolist() for outcome in outcomes] == [[num_ranks + 6], [num_ranks + 7]]
        finally:
            executor.close()

    def test_masks_may_be_cancelled(self, num_ranks: int) -> None:
        """A step whose mask is cancelled ends, its outcome raises, and later steps run."""
        executor = self._start(num_ranks)
        try:
            plan = fake_plan(0, num_masks=1)
            dropped, later = executor.submit(plan), executor.submit(fake_plan(1))
            assert plan.token_mask is not None
            plan.token_mask.bits.cancel()
            assert dropped.exception() is not None, "the outcome of a cancelled step did not raise"
            assert later.result().token_ids.tolist() == [num_ranks]
            assert executor.failure is None
        finally:
            executor.close()

    def test_calls_run_between_steps(self, num_ranks: int) -> None:
        """`call` runs a function after all plans that were submitted before, and returns its value or its error."""
        executor = self._start(num_ranks)
        try:
            outcome = executor.submit(fake_plan(0))
            assert executor.call(lambda: "value").result() == "value"
            assert outcome.result().token_ids.tolist() == [num_ranks]
            assert isinstance(executor.call(lambda: 1 / 0).exception(), ZeroDivisionError)
            assert executor.submit(fake_plan(1)).result().token_ids.tolist() == [num_ranks]
        finally:
            executor.close()

    def test_close_waits_and_leaves_nothing(self, num_ranks: int) -> None:
        """`close` waits for the submitted steps; afterwards, no process of a rank is left."""
        before = _children()
        executor = self._start(num_ranks)
        outcome = executor.submit(fake_plan(0))
        executor.close()
        assert outcome.result().token_ids.tolist() == [num_ranks]
        assert _children() == before, "a process is left after close()"

    def test_a_failed_rank_ends_the_group(self, rank: int, fault: str) -> None:
        """If a rank ends, raises or misses the deadline, all outcomes raise an error with the rank and the reason."""
        before = _children()
        executor = self._start(2, timeout_s=_TIMEOUT_S)
        calls: list[int] = []
        executor.when_failed(lambda: calls.append(1))
        try:
            assert executor.submit(fake_plan(0)).exception() is None
            start_s = time.monotonic()
            outcomes = [executor.submit(fake_plan(1, FAULTS[fault], rank)), executor.submit(fake_plan(2))]
            for outcome in outcomes:
                _check_failure(outcome.exception(), rank, fault)
            assert time.monotonic() - start_s < _LIMIT_S, "the error came long after the deadline"
            _check_failure(executor.failure, rank, fault)
            _check_failure(executor.submit(fake_plan(3)).exception(), rank, fault)
            _check_failure(executor.call(lambda: None).exception(), rank, fault)
            assert calls, "the callback of when_failed() was not called"
            assert _children() == before, "a process is left after a failure"
        finally:
            executor.close()

    def test_a_rank_that_ends_between_steps_is_noticed(self) -> None:
        """The end of a rank while no step runs is reported by `when_failed` and `failure`."""
        before = _children()
        executor = self._start(2)
        calls: list[int] = []
        executor.when_failed(lambda: calls.append(1))
        try:
            next(iter(_children() - before)).kill()
            until_s = time.monotonic() + _LIMIT_S
            while not calls and time.monotonic() < until_s:
                time.sleep(0.01)
            assert calls, "the callback of when_failed() was not called"
            assert isinstance(executor.failure, RankFailedError)
        finally:
            executor.close()

    def test_a_rank_that_refuses_to_start(self) -> None:
        """If a rank refuses the configuration, `create` raises the rank's error, and no process is left."""
        before = _children()
        message = "nothing: create() returned"
        try:
            self._start(2, refuse="no such checkpoint").close()
        except ConfigError as error:
            message = str(error)
        assert message == "no such checkpoint", f"a rank that refuses to start raised {message}"
        assert _children() == before, "a process is left after a failed start"


def _check_failure(error: BaseException | None, rank: int, fault: str) -> None:
    assert isinstance(error, RankFailedError), f"expected a RankFailedError, got {error!r}"
    reasons = {"raises": "layer 3 is broken", "is killed": "killed", "hangs": "no answer", "ends": "exit status 3"}
    text = str(error)
    assert f"rank {rank}" in text, f"the error does not name rank {rank}: {text}"
    assert reasons[fault] in text, f"the error does not have the reason {reasons[fault]!r}: {text}"


def _children() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
