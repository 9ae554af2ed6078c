"""Checks that take too long, or hang."""

import asyncio
import subprocess
import sys
import threading

import pytest

from graftlm.errors import GrammarError, UnavailableError
from graftlm.processes.check_threads import CheckThreads

HANGS = """
import asyncio, threading
from graftlm.errors import GrammarError
from graftlm.processes.check_threads import CheckThreads

async def main():
    try:
        await CheckThreads(1, 0.1).run(threading.Event().wait)
    except GrammarError as error:
        print(error)

asyncio.run(main())
"""


def fail():
    raise KeyError("x")


def test_what_a_check_returns_or_raises_comes_back():
    async def main():
        threads = CheckThreads(2, 30.0)
        assert await asyncio.gather(*[threads.run(lambda i=i: i) for i in range(20)]) == list(range(20))
        with pytest.raises(KeyError):
            await threads.run(fail)

    asyncio.run(main())


def test_a_check_that_hangs_is_given_up_and_others_go_on():
    async def main():
        gate = threading.Event()
        threads = CheckThreads(1, 0.2)
        hung = asyncio.create_task(threads.run(gate.wait))
        await asyncio.sleep(0)
        assert await threads.run(lambda: 1) == 1
        with pytest.raises(GrammarError, match=r"longer than 0\.2 s"):
            await hung
        for _ in range(7):
            with pytest.raises(GrammarError):
                await threads.run(gate.wait)
        with pytest.raises(UnavailableError, match="8 checks"):
            await threads.run(lambda: 1)
        gate.set()
        while True:
            try:
                assert await threads.run(lambda: 2) == 2
                break
            except UnavailableError:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_at_most_so_many_run_also_when_nobody_waits_any_more():
    async def main():
        gate, running = threading.Event(), []
        threads = CheckThreads(2, 30.0)

        def check():
            running.append(1)
            gate.wait(20)

        tasks = [asyncio.create_task(threads.run(check)) for _ in range(6)]
        while len(running) < 2:
            await asyncio.sleep(0.01)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.sleep(0.1)
        assert len(running) == 2
        gate.set()
        await asyncio.gather(*tasks[2:])
        assert len(running) == 6

    asyncio.run(main())


def test_a_process_ends_beside_a_check_that_hangs():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert "longer than 0.1 s" in done.stdout
