"""Grammar checks that take too long or hang."""

import asyncio
import subprocess
import sys
import threading
import time

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


def test_results_and_exceptions_of_checks_are_passed_on():
    async def main():
        threads = CheckThreads(2, 30.0)
        assert await asyncio.gather(*[threads.run(lambda i=i: i) for i in range(20)]) == list(range(20))
        with pytest.raises(KeyError):
            await threads.run(fail)

    asyncio.run(main())


def test_a_hanging_check_times_out_and_others_continue():
    async def main():
        gate = threading.Event()
        threads = CheckThreads(1, 0.2)
        for _ in range(8):  # each check frees its turn when it times out, but its thread still runs
            with pytest.raises(GrammarError, match=r"longer than 0\.2 s"):
                await threads.run(gate.wait)
        start_s = time.monotonic()
        ended = await asyncio.gather(*[threads.run(lambda: 1) for _ in range(30)], return_exceptions=True)
        assert time.monotonic() - start_s < 5
        assert all(type(error) is UnavailableError and "8 checks" in str(error) for error in ended), ended
        assert await CheckThreads(1, 30.0).run(lambda: 2) == 2
        gate.set()
        while True:
            try:
                assert await threads.run(lambda: 2) == 2
                break
            except (UnavailableError, GrammarError):  # the threads have not ended yet, or the machine is slow
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_more_checks_than_turns_wait_or_are_refused():
    async def main():
        gate = threading.Event()
        threads = CheckThreads(1, 0.3)
        hung = [asyncio.create_task(threads.run(gate.wait)) for _ in range(30)]
        ended = await asyncio.gather(*hung, return_exceptions=True)
        gate.set()
        assert {type(error) for error in ended} <= {GrammarError, UnavailableError}
        assert 1 <= sum("longer than 0.3 s" in str(error) for error in ended) <= 8

    asyncio.run(main())


def test_a_slow_check_occupies_a_turn_for_at_most_a_second():
    async def main():
        gate = threading.Event()
        threads = CheckThreads(1, 60.0)
        slow = asyncio.create_task(threads.run(gate.wait))
        await asyncio.sleep(0)
        assert await asyncio.wait_for(threads.run(lambda: 1), 30) == 1
        gate.set()
        assert await slow

    asyncio.run(main())


def test_the_number_of_running_checks_is_limited_even_after_their_timeouts():
    async def main():
        gate, running = threading.Event(), []
        threads = CheckThreads(20, 60.0)

        def check():
            running.append(1)
            gate.wait(30)

        tasks = [asyncio.create_task(threads.run(check)) for _ in range(12)]
        while len(running) < 8:
            await asyncio.sleep(0.01)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.sleep(0.1)
        assert len(running) == 8
        gate.set()
        await asyncio.gather(*tasks[2:])
        assert len(running) == 12

    asyncio.run(main())


def test_a_process_can_end_despite_a_hanging_check():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert "longer than 0.1 s" in done.stdout
