"""The launcher with real child processes: the calls of its listener, and a clean end."""

import asyncio
import os
import resource
import signal
from contextlib import asynccontextmanager

import psutil
import pytest
import pytest_asyncio
import uvloop

from graftlm import EngineConfig
from graftlm.checkpoint import resolve_checkpoint
from graftlm.errors import EngineError, GraftlmError
from graftlm.processes.channels import Outbox
from graftlm.processes.launcher import Launcher
from graftlm.processes.messages import Call, Failed, Load, Ready, Reply
from graftlm.processes.names import DETOKENIZER
from graftlm.processes.os_process import ChildProcess
from graftlm.tokenization import Tokenizer

SCHEDULER = "scheduler-0"
CONFIG = {"model": "demo", "memory": {"kv_tokens": 1024}, "server": {"restart": True, "watchdog_s": 1.0}}

in_one_loop = pytest.mark.asyncio(loop_scope="module")


class Listener:
    """Records the launcher's calls in order."""

    def __init__(self):
        self.heard = []
        self.messages = []

    def receive(self, message):
        self.messages.append(message)

    def process_ready(self, name):
        self.heard.append(("ready", name))

    def process_died(self, name, reason):
        self.heard.append(("died", name, reason))

    def process_stuck(self, name, seconds):
        self.heard.append(("stuck", name))

    def process_recovered(self, name):
        self.heard.append(("moves", name))

    def restarts_ended(self):
        self.heard.append(("gave up",))

    async def next(self, num, timeout_s=20.0):
        """Wait for this number of events, and return them."""
        await until(lambda: len(self.heard) >= num, timeout_s)
        taken, self.heard[:num] = self.heard[:num], []
        return taken


async def until(condition, timeout_s=20.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def tokenizer_json():
    return Tokenizer.load(resolve_checkpoint("demo")).to_json()


@asynccontextmanager
async def launched(start_process=ChildProcess.start, start_timeout_s=60.0, **config):
    launcher = Launcher(
        EngineConfig.load(CONFIG | config), start_process=start_process, start_timeout_s=start_timeout_s
    )
    try:
        await launcher.start()
        yield launcher
    finally:
        await launcher.close()


def stale(launcher, message):
    """Deliver a message in the way of a child process."""
    outbox = Outbox(f"ipc://{launcher.folder}/main")
    outbox.send(message)
    outbox.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    async with launched() as launcher:
        await launcher.ready(tokenizer_json())
        listener = Listener()
        launcher.watch(listener)
        assert await listener.next(2) == [("ready", DETOKENIZER), ("ready", SCHEDULER)]
        yield launcher, listener


@in_one_loop
async def test_replies_are_passed_on_except_those_to_the_launchers_own_calls(running):
    launcher, listener = running
    listener.messages.clear()
    await until(lambda: any(isinstance(message, Load) for message in listener.messages))  # a ping was answered
    launcher.send(SCHEDULER, Call(call_id=5, name="ping"))
    await until(lambda: any(isinstance(message, Reply) for message in listener.messages))
    assert {message.call_id for message in listener.messages if isinstance(message, Reply)} == {5}
    assert listener.heard == []


@in_one_loop
async def test_a_silent_process_is_reported_and_so_is_its_recovery(running):
    launcher, listener = running
    os.kill(launcher.pids[DETOKENIZER], signal.SIGSTOP)
    assert await listener.next(1) == [("stuck", DETOKENIZER)]
    os.kill(launcher.pids[DETOKENIZER], signal.SIGCONT)
    assert await listener.next(1) == [("moves", DETOKENIZER)]


@in_one_loop
async def test_a_death_while_stacks_are_read_does_not_end_the_watch(running):
    launcher, listener = running
    for _ in range(2):  # the second round shows that the watch survived the first
        os.kill(launcher.pids[DETOKENIZER], signal.SIGSTOP)
        assert await listener.next(1) == [("stuck", DETOKENIZER)]
        os.kill(launcher.pids[DETOKENIZER], signal.SIGKILL)
        died, ready = await listener.next(2)
        assert died == ("died", DETOKENIZER, "killed by SIGKILL")
        assert ready == ("ready", DETOKENIZER)


@in_one_loop
@pytest.mark.parametrize("kind", [Ready, Failed])
async def test_late_messages_of_a_dead_process_are_not_assigned_to_its_successor(running, kind):
    launcher, listener = running
    dead = launcher.pids[DETOKENIZER]
    os.kill(dead, signal.SIGKILL)
    await listener.next(1)
    what = {"info": {"old": True}} if kind is Ready else {"error": "EngineError", "message": "out of memory"}
    stale(launcher, kind(process=DETOKENIZER, pid=dead, **what))
    assert await listener.next(1) == [("ready", DETOKENIZER)]
    launcher.send(DETOKENIZER, Call(call_id=6, name="ping"))
    await until(lambda: Reply(process=DETOKENIZER, call_id=6) in listener.messages)


@in_one_loop
async def test_both_processes_may_restart_at_once(running):
    launcher, listener = running
    for pid in launcher.pids.values():
        os.kill(pid, signal.SIGKILL)
    heard = await listener.next(4)
    assert {event[:2] for event in heard} == {
        (what, name) for what in ("died", "ready") for name in (DETOKENIZER, SCHEDULER)
    }


@in_one_loop
async def test_the_launcher_ends_if_no_process_can_be_started(running):
    launcher, listener = running
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, hard))  # all lower file numbers are in use
    try:
        os.kill(launcher.pids[DETOKENIZER], signal.SIGKILL)
        died, gave_up = await listener.next(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert died[:2] == ("died", DETOKENIZER)
    assert gave_up == ("gave up",)
    assert (await launcher.fatal).startswith("detokenizer cannot be started: ")


async def test_closing_during_the_start_leaves_no_process_and_no_folder():
    async with launched() as launcher:
        children = [psutil.Process(pid) for pid in launcher.pids.values()]
        assert len(children) == 2
        waiting = asyncio.ensure_future(launcher.ready("{}"))
        await asyncio.sleep(0)
        await launcher.close()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert not any(child.is_running() for child in children)
        assert not launcher.folder.exists()
        assert launcher.pids == {}
        await launcher.close()  # a second close changes nothing


async def test_closing_after_the_processes_have_died_leaves_no_folder():
    launcher = Launcher(EngineConfig.load(CONFIG))
    await launcher.start()
    for child in map(psutil.Process, list(launcher.pids.values())):
        child.kill()
        child.wait(5)  # before the event loop has noticed it
    await launcher.close()
    assert not launcher.folder.exists()


async def test_a_process_that_died_during_the_start_is_an_error():
    async with launched() as launcher:
        waiting = asyncio.ensure_future(launcher.ready(tokenizer_json()))
        detokenizer = launcher._children[DETOKENIZER]
        await until(lambda: detokenizer.is_ready)
        os.kill(launcher.pids[DETOKENIZER], signal.SIGKILL)
        await waiting
        with pytest.raises(EngineError, match="detokenizer ended while the other processes started: killed by SIGKILL"):
            launcher.watch(Listener())


async def test_a_failed_start_reports_the_reason_despite_a_file_with_a_modules_name(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('not this one')")
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        async with launched(model={"path": "demo", "context_len": 10**9}) as launcher:
            with pytest.raises(GraftlmError, match="context_len"):
                await launcher.ready(tokenizer_json())
    finally:
        os.chdir(before)


async def hear_of_a_death(start_process, start_timeout_s=60.0):
    """Kill a process whose successors are started by a given function; return the listener's events and the reason
    of the end.
    """
    num_started = 0

    async def start(command, environment, first_line):
        nonlocal num_started
        num_started += 1
        if num_started > 2:
            return await start_process(command, environment, first_line)
        return await ChildProcess.start(["sleep", "60"], environment, first_line)

    async with launched(start, start_timeout_s) as launcher:
        listener = Listener()
        launcher.watch(listener)
        await listener.next(2)
        os.kill(launcher.pids[DETOKENIZER], signal.SIGKILL)
        await until(lambda: ("gave up",) in listener.heard)
        return listener.heard, await launcher.fatal


def test_a_process_that_ends_before_its_setup_is_restarted_only_a_few_times():
    async def start_and_wait(command, environment, first_line):
        process = await ChildProcess.start(["false"], environment, first_line)
        await process.wait()
        return process

    heard, reason = uvloop.run(hear_of_a_death(start_and_wait))
    ends = ["killed by SIGKILL", "exit status 1", "exit status 1"]
    assert heard == [*(("died", DETOKENIZER, end) for end in ends), ("gave up",)]
    assert reason == "detokenizer ended: exit status 1"


async def test_a_process_that_does_not_start_in_time_is_an_error():
    async def hang(command, environment, first_line):
        await asyncio.Event().wait()

    heard, reason = await hear_of_a_death(hang, start_timeout_s=0.5)
    assert ("died", DETOKENIZER, "killed by SIGKILL") in heard
    assert reason == "detokenizer was not started within 0.5 s"


async def test_a_process_that_does_not_read_its_setup_is_killed_and_counts_as_a_failed_start():
    starts = []

    async def start(command, environment, first_line):
        starts.append(command[-1])
        return await ChildProcess.start(["sleep", "60"], environment, first_line)

    async with launched(start, start_timeout_s=0.2) as launcher:
        listener = Listener()
        launcher.watch(listener)
        await until(lambda: launcher.fatal.done())
        assert "ended: killed by SIGKILL" in await launcher.fatal
        assert max(starts.count(DETOKENIZER), starts.count(SCHEDULER)) == 3


async def test_an_exception_in_the_launcher_is_reported():
    async def start(command, environment, first_line):
        raise ZeroDivisionError("of the test")

    heard, reason = await hear_of_a_death(start)
    assert heard == [("died", DETOKENIZER, "killed by SIGKILL"), ("gave up",)]
    assert reason == "ZeroDivisionError: of the test"
