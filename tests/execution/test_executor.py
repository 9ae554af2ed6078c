"""The executor that launches steps ahead of the device, with a device that answers when told to."""

from concurrent.futures import Future

import pytest

from graftlm.execution.executor import InlineExecutor, LaunchExecutor, WorkerExecutor, executor_for


class Device:
    """Launches plans, which are names here; a step ends when its future does."""

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


def test_the_next_step_is_launched_before_one_has_ended(device, executor):
    first, second = executor.submit("a"), executor.submit("b")
    device.steps["b"].set_result("B")  # would be told of only after a
    with pytest.raises(TimeoutError):
        second.result(timeout=0)
    device.steps["a"].set_result("A")
    assert (first.result(), second.result()) == ("A", "B")
    assert device.launched == ["a", "b"]


def test_an_error_reaches_whoever_waits_and_the_next_step_runs(device, executor):
    failed, wrong, fine = executor.submit("bad"), executor.submit("a"), executor.submit("b")
    device.steps["a"].set_exception(RuntimeError("the device failed"))
    device.steps["b"].set_result("B")
    with pytest.raises(ValueError, match="cannot be launched"):
        failed.result()
    with pytest.raises(RuntimeError, match="the device failed"):
        wrong.result()
    assert fine.result() == "B"


def test_a_function_is_called_when_the_steps_before_it_have_ended(device, executor):
    ended = []
    executor.submit("a").add_done_callback(lambda future: ended.append("a"))
    called = executor.call(lambda: ended.append("call"))
    device.steps["a"].set_result("A")
    called.result()
    assert ended == ["a", "call"]


def test_closing_waits_for_what_was_launched(device):
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
def test_only_a_gpu_is_given_steps_ahead(device, device_type, overlap, kind):
    executor = executor_for(device, device_type, overlap=overlap)
    executor.close()
    assert type(executor) is kind
