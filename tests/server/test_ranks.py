"""A server whose model is split over processes: its answers, its health, and what it does when a rank fails."""

import re
import signal
import threading

import psutil
import pytest
import requests

from graftlm.testing.server_process import ServerProcess, wait_until

pytestmark = pytest.mark.full

CONFIG = {
    "model": {"path": "demo", "dtype": "float32", "device": "cpu"},
    "memory": {"kv_tokens": 4096},
    "server": {"restart": True},
}
RANKS = CONFIG | {"parallel": {"tensor": 2, "options": {"timeout_s": 3}}}
BODIES = [
    {"prompt": "The capital of France is", "max_tokens": 16},
    {"prompt": ["Once upon a time", "A small river"], "max_tokens": 24, "logprobs": 2, "ignore_eos": True},
    {"prompt": "Numbers:", "max_tokens": 16, "regex": "[0-9, ]{4,12}"},
    {"prompt": "A letter", "max_tokens": 12, "temperature": 0.7, "seed": 5},
]


def answers(server):
    found = []
    for body in BODIES:
        whole = {"model": "demo", "temperature": 0} | body
        response = requests.post(f"{server.url}/v1/completions", json=whole, timeout=60)
        assert response.status_code == 200, response.text
        found.append([choice["text"] for choice in response.json()["choices"]])
    return found


def rank_process(server, rank):
    """Return the process of a rank."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if child.cmdline()[-1:] == [f"scheduler-0/rank-{rank}"]:
            return child
    raise AssertionError(f"no process of rank {rank}")


@pytest.fixture(scope="module")
def expected():
    with ServerProcess(CONFIG) as server:
        return answers(server)


@pytest.fixture(scope="module")
def server():
    with ServerProcess(RANKS) as ranks:
        yield ranks


def test_answers_equal_those_of_one_process(server, expected):
    assert answers(server) == expected
    assert requests.get(f"{server.url}/health", timeout=10).json()["status"] == "ok"
    assert "rank 0 of 2 runs as pid" in server.log
    assert "of weights" in server.log


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "killed by SIGKILL"), (signal.SIGSTOP, "no answer")])
def test_a_failed_rank_ends_its_requests_and_is_replaced(server, expected, rank, number, reason):
    found = []

    def request():
        body = {"model": "demo", "prompt": "The river", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
        found.append(requests.post(f"{server.url}/v1/completions", json=body, timeout=60))

    threads = [threading.Thread(target=request) for _ in range(3)]
    for thread in threads:
        thread.start()
    running = re.compile(r"^graftlm_running_requests(\{.*\})? 3", re.MULTILINE)
    wait_until(lambda: running.search(requests.get(f"{server.url}/metrics", timeout=10).text))
    num_restarts = server.log.count("scheduler-0 is ready again")
    failed = rank_process(server, rank)
    failed.send_signal(number)
    for thread in threads:
        thread.join(30)
    for response in found:
        assert response.status_code >= 500, response.text
        message = response.json()["error"]["message"]
        assert f"rank {rank} (pid {failed.pid}): {reason}" in message
    assert len(found) == 3
    wait_until(lambda: server.log.count("scheduler-0 is ready again") > num_restarts, 60)
    assert requests.get(f"{server.url}/health", timeout=10).status_code == 200
    assert answers(server) == expected
    assert not psutil.pid_exists(failed.pid)


def test_no_process_is_left():
    with ServerProcess(RANKS) as one:
        ranks = [rank_process(one, rank) for rank in range(2)]
        answers(one)
    wait_until(lambda: not any(process.is_running() for process in ranks), 10)
