"""The launcher's operating system functions."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from graftlm.processes.os_process import ChildProcess, command_line, describe_end, device_of, end, stacks_of

#: Counts the handlers that fork() runs: glibc's list of pthread_atfork, and Python's own.
COUNT_FORK_HANDLERS = """
import asyncio, ctypes, os, sys
import uvloop
from graftlm.processes.os_process import ChildProcess

num_calls = {"libc": 0, "python": 0}

@ctypes.CFUNCTYPE(None)
def in_libc():
    num_calls["libc"] += 1

def in_python():
    num_calls["python"] += 1

ctypes.CDLL(None).__register_atfork(in_libc, None, None, None)
os.register_at_fork(before=in_python)

async def run():
    process = await ChildProcess.start([sys.executable, "-c", "input()"], os.environ, b"line\\n")
    print(await process.wait(), num_calls)

uvloop.run(run())
if os.fork() == 0:
    os._exit(0)
print(num_calls)
"""


async def start(*command, first_line=b""):
    return await ChildProcess.start(command, os.environ, first_line)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ["0", "1", "2"]),
        ("4,7", ["4", "7", "4"]),
        ("GPU-aa", ["GPU-aa", "GPU-aa", "GPU-aa"]),
        ("-1", ["-1", "-1", "-1"]),
        ("", ["", "", ""]),
    ],
)
def test_replicas_are_distributed_over_the_visible_gpus(visible, devices):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [device_of(replica, environment) for replica in range(3)] == devices


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_an_exit_status_is_described_in_words(status, text):
    assert describe_end(status) == text


def test_files_of_the_current_folder_replace_modules_only_if_they_do_in_this_process(tmp_path):
    before, path = os.getcwd(), list(sys.path)
    os.chdir(tmp_path)
    try:
        assert "-P" in command_line()
        sys.path.append(os.getcwd())  # plugins are found there: after the standard library
        assert "-P" in command_line()
        sys.path.insert(0, os.getcwd())
        assert "-P" not in command_line()
    finally:
        sys.path[:] = path
        os.chdir(before)


@pytest.mark.skipif(sys.platform != "linux", reason="vfork is what Linux has")
def test_a_process_is_started_without_fork_handlers():
    done = subprocess.run([sys.executable, "-c", COUNT_FORK_HANDLERS], capture_output=True, text=True, timeout=60)
    without, after_fork = done.stdout.splitlines()
    assert without == "0 {'libc': 0, 'python': 0}"
    assert after_fork == "{'libc': 1, 'python': 1}"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_process_has_its_own_session_and_ends_with_its_status(run, tmp_path):
    may_end = tmp_path / "may end"
    script = f'read -r line; test "$line" = "a line"; status=3$?; until test -e "{may_end}"; do :; done; exit $status'

    async def live():
        process = await start("sh", "-c", script, first_line=b"a line\n")
        assert os.getsid(process.pid) == process.pid
        assert process.returncode is None
        may_end.touch()
        return await asyncio.gather(process.wait(), process.wait()), process.returncode

    assert run(live()) == ([30, 30], 30)


async def test_standard_input_stays_open_while_the_process_runs():
    # an end of file would be readable, too
    count_readable = "import select, sys; sys.exit(len(select.select([0], [], [], 0.3)[0]))"
    process = await start(sys.executable, "-c", count_readable)
    assert await process.wait() == 0


async def test_a_first_line_that_is_not_read_does_not_block_the_event_loop():
    process = await start("sleep", "60", first_line=b"x" * (1 << 20))  # a pipe takes 64 KiB
    process.kill()
    async with asyncio.timeout(10):
        assert await process.wait() == -signal.SIGKILL


async def test_a_command_that_does_not_exist_is_an_error():
    with pytest.raises(FileNotFoundError):
        await start("graftlm-has-no-such-command")


async def test_a_process_whose_start_is_cancelled_is_killed(tmp_path):
    path = tmp_path / "pid"
    for _ in range(3):
        starting = asyncio.ensure_future(start("sh", "-c", f"echo $$ >> {path}; exec sleep 60"))
        await asyncio.sleep(0)  # the thread that starts the process runs
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    async with asyncio.timeout(10):
        while any(thread.name == "graftlm-child" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in (path.read_text() if path.exists() else "").split())


async def test_an_ended_process_can_be_ended_again(tmp_path):
    process = await start("true")
    await process.wait()
    process.kill()
    await end(process)
    (tmp_path / "stacks").touch()
    assert (await stacks_of(process, tmp_path / "stacks")).startswith("(none")
    assert process.returncode == 0


async def test_a_process_may_write_its_stacks_late(tmp_path):
    path, up = tmp_path / "stacks", tmp_path / "up"
    path.touch()
    script = f"trap 'echo here > {path}; exit' USR1; touch {up}; while :; do sleep 0.01; done"
    process = await start("sh", "-c", script)
    async with asyncio.timeout(20):
        while not up.exists():
            await asyncio.sleep(0.01)
    assert await stacks_of(process, path) == "here\n"
    await end(process)
    assert process.returncode != -signal.SIGKILL


CHILD_WITH_STACKS = """
import sys, threading
import numpy  # starts threads of its own
from graftlm.processes.child import write_stacks_on_signals

all_turn = threading.Barrier(5, lambda: print("up", flush=True))

def turn_round():
    all_turn.wait()
    while True:
        call(3)

def call(depth):
    return depth and call(depth - 1)

write_stacks_on_signals(open(sys.argv[1], "w"))
if sys.argv[2] == "runs":
    for _ in range(4):
        threading.Thread(target=turn_round, daemon=True).start()
    turn_round()
print("up", flush=True)
sum(range(10**15))  # holds the GIL, whatever signal comes
"""


@asynccontextmanager
async def started_with_stacks(path, kind, tmp_path):
    """Start a process whose threads run, or one that holds the GIL; kill it at the end."""
    script, out = tmp_path / "child.py", tmp_path / "out"
    script.write_text(CHILD_WITH_STACKS)
    process = await start("sh", "-c", f"exec {sys.executable} {script} {path} {kind} > {out}")
    try:
        async with asyncio.timeout(60):
            while not (out.exists() and out.read_text()):
                await asyncio.sleep(0.01)
        yield process
    finally:
        process.kill()
        await process.wait()


async def test_a_running_process_survives_stack_reports_and_each_report_is_its_own(tmp_path):
    path = tmp_path / "stacks"
    async with started_with_stacks(path, "runs", tmp_path) as process:
        for _ in range(20):
            assert (await stacks_of(process, path)).count("in turn_round") == 5
        assert process.returncode is None


async def test_a_process_that_holds_the_gil_also_reports_the_current_line(tmp_path):
    path = tmp_path / "stacks"
    async with started_with_stacks(path, "hangs", tmp_path) as process:
        assert 'child.py", line 22 in <module>' in await stacks_of(process, path)


async def test_a_stopped_process_gets_no_signal(tmp_path):
    path = tmp_path / "stacks"
    async with started_with_stacks(path, "runs", tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(10):
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        assert (await stacks_of(process, path)).startswith("(none: the process is stopped")
        process.send_signal(signal.SIGCONT)
        assert (await stacks_of(process, path)).count("in turn_round") == 5
