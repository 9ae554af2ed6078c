"""What the launcher asks of the operating system."""

import asyncio
import os
import signal
import sys

import pytest

from graftlm.processes.os_process import command_line, describe_end, device_of, end, kill, stacks_of


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
def test_replicas_share_the_gpus_that_are_visible(visible, devices):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [device_of(replica, environment) for replica in range(3)] == devices


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_an_end_is_told_in_words(status, text):
    assert describe_end(status) == text


def test_files_of_the_current_folder_stand_in_for_modules_only_if_they_do_in_this_process(tmp_path):
    before, path = os.getcwd(), list(sys.path)
    os.chdir(tmp_path)
    try:
        assert "-P" in command_line()
        sys.path.append(os.getcwd())  # where plugins are found: behind the standard library
        assert "-P" in command_line()
        sys.path.insert(0, os.getcwd())
        assert "-P" not in command_line()
    finally:
        sys.path[:] = path
        os.chdir(before)


async def test_what_has_ended_can_be_ended_again(tmp_path):
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    kill(process)
    await end(process)
    (tmp_path / "stacks").touch()
    assert (await stacks_of(process, tmp_path / "stacks")).startswith("(none")
    assert process.returncode == 0


async def test_a_process_may_write_its_stacks_late(tmp_path):
    path = tmp_path / "stacks"
    path.touch()
    script = f"trap 'echo here > {path}; exit' USR1; echo up; while :; do sleep 0.01; done"
    process = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    assert await stacks_of(process, path) == "here\n"
    await end(process)
    assert process.returncode != -signal.SIGKILL
