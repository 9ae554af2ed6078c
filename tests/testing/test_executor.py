"""The conformance kit of executors finds what is broken on purpose."""

import pytest

from graftlm.contracts import ExecutorCapabilities, StepExecutor
from graftlm.execution.executor import InlineExecutor
from graftlm.testing import ExecutorConformance, run_conformance
from graftlm_executor.processes import LocalProcesses


class Wrapped(StepExecutor):
    """An executor that does what another one does, except for what a subclass breaks."""

    def __init__(self, inner):
        self.inner = inner

    def submit(self, plan):
        return self.inner.submit(plan)

    def call(self, function):
        return self.inner.call(function)

    def close(self):
        self.inner.close()


class RunsTwice(Wrapped):
    def submit(self, plan):
        self.inner.submit(plan)
        return self.inner.submit(plan)


class SkipsThird(Wrapped):
    last = None

    def submit(self, plan):
        if plan.step_id != 2 or self.last is None:
            self.last = self.inner.submit(plan)
        return self.last


class CallsAtOnce(Wrapped):
    def call(self, function):
        return InlineExecutor(None).call(lambda: None)


class WaitsForMasks(Wrapped):
    """Runs a step inside of submit, so that a mask never comes."""

    def submit(self, plan):
        if plan.token_mask is not None and not plan.token_mask.bits.done():
            raise RuntimeError("the mask is missing")
        return self.inner.submit(plan)


def kit(make, max_ranks=1):
    class Kit(ExecutorConformance):
        capabilities = ExecutorCapabilities(max_ranks=max_ranks)
        parameters = dict(ExecutorConformance.parameters) | {"num_ranks": (max_ranks,)}

        def create(self, context):
            return make(context)

    return Kit


def failed(make):
    return {result.name.partition("[")[0] for result in run_conformance(kit(make)) if result.error}


def test_an_executor_that_keeps_the_contract_passes():
    assert failed(lambda context: Wrapped(context.run_here())) == set()


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (RunsTwice, "test_plans_run_in_their_order"),
        (SkipsThird, "test_plans_run_in_their_order"),
        (CallsAtOnce, "test_calls_run_between_steps"),
        (WaitsForMasks, "test_masks_may_follow"),
        (WaitsForMasks, "test_masks_may_be_cancelled"),
    ],
)
def test_a_broken_executor_is_found(broken, sentence):
    assert sentence in failed(lambda context: broken(context.run_here()))


class Blind(LocalProcesses):
    """Never reports the end of a process."""

    def ended(self):
        return {}


class Lenient(LocalProcesses):
    """Ends no process."""

    def stop(self, timeout_s):
        self.left = True


@pytest.mark.full
@pytest.mark.parametrize(
    ("processes", "sentence", "arguments"),
    [
        (Blind, "test_a_rank_that_ends_between_steps_is_noticed", {}),
        (Blind, "test_a_failed_rank_ends_the_group", {"rank": 1, "fault": "is killed"}),
        (Lenient, "test_close_waits_and_leaves_nothing", {"num_ranks": 2}),
    ],
)
def test_broken_processes_are_found(processes, sentence, arguments):
    made = []

    def create(context):
        made.append(processes(context.launches, [None] * len(context.launches)))
        return context.run_on(made[-1])

    try:
        with pytest.raises(AssertionError):
            getattr(kit(create, max_ranks=2)(), sentence)(**arguments)
    finally:
        for process in made[0]._processes:
            process.kill()
            process.wait()
            process.stdin.close()
