"""The executor that launches steps ahead of the device, with a device that answers when the test tells it to."""

from concurrent.futures import Future

import pytest

from graftlm.execution.executor import InlineExecutor, LaunchExecutor, WorkerExecutor, executor_for


class Device:
    """Launches plans, which are names in this test; a step ends when its future has a result."""

    def __init__(self):
        self.launched = []
        self.steps = {name: Future() for name in "abc"}

    def run(self, plan):
        return self.launch(plan).result()

    def launch(self, plan):
        if plan == "bad":
            raise ValueError("cannot be launched")
        self.launched.append(plan)
        return self.steps[plan]


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def executor(device):
    made = LaunchExecutor(device.launch)
    yield made
    for step in device.steps.values():
        if not step.done():
            step.set_result(None)
    made.close()


def test_the_next_step_is_launched_before_the_previous_one_ends(device, executor):
    first, second = executor.submit("a"), executor.submit("b")
    device.steps["b"].set_result("B")  # this result is reported only after that of a
    with pytest.raises(TimeoutError):
        second.result(timeout=0)
    device.steps["a"].set_result("A")
    assert (first.result(), second.result()) == ("A", "B")
    assert device.launched == ["a", "b"]


def test_an_error_is_passed_to_the_waiting_caller_and_the_next_step_runs(device, executor):
    failed, wrong, fine = executor.submit("bad"), executor.submit("a"), executor.submit("b")
    device.steps["a"].set_exception(RuntimeError("the device failed"))
    device.steps["b"].set_result("B")
    with pytest.raises(ValueError, match="cannot be launched"):
        failed.result()
    with pytest.raises(RuntimeError, match="the device failed"):
        wrong.result()
    assert fine.result() == "B"


def test_a_function_is_called_after_the_previous_steps_have_ended(device, executor):
    ended = []
    executor.submit("a").add_done_callback(lambda future: ended.append("a"))
    called = executor.call(lambda: ended.append("call"))
    device.steps["a"].set_result("A")
    called.result()
    assert ended == ["a", "call"]


def test_close_waits_for_launched_steps(device):
    executor = LaunchExecutor(device.launch)
    future = executor.submit("a")
    device.steps["a"].set_result("A")
    executor.close()
    assert future.done()


@pytest.mark.parametrize(
    ("device_type", "overlap", "kind"),
    [
        ("cpu", True, WorkerExecutor),
        ("cpu", False, InlineExecutor),
        ("cuda", True, LaunchExecutor),
        ("cuda", False, InlineExecutor),
    ],
)
def test_only_a_gpu_gets_steps_ahead_of_time(device, device_type, overlap, kind):
    executor = executor_for(device, device_type, overlap=overlap)
    executor.close()
    assert type(executor) is kind
