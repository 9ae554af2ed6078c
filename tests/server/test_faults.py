"""Requests when a process is killed, hangs, or gets a signal to stop.

Before the faults, servers enforce grammars, load an adapter, replace weights and write a profile. Each of these leaves
state behind in their processes. In the quick set only the server that restarts its processes does this; with `--full`
every server does. Each kind of fault is tried with `server.restart` on and, with `--full`, off. The start of a server
takes seconds. Tests therefore share a server if it survives their faults; the last of these tests ends it.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest
import requests

from graftlm.testing.aged_server import age, ageable, bring_back
from graftlm.testing.server_process import ServerProcess, wait_until

#: Long enough for the requests of `age` on a busy machine. In the quick set, no request of `impatient` succeeds.
REQUEST_LIMIT_S, QUICK_REQUEST_LIMIT_S = 8.0, 1.0
LONG = {"text": "Tell me a story", "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
LONGER = {"text": "Tell me a story", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}


HANGING_PLUGIN = """
import time
from pathlib import Path

from graftlm import Provider, hookimpl
from graftlm.contracts import EvictionStrategy


class Hanging(EvictionStrategy):
    def __init__(self, flag):
        self.flag = flag

    def priority(self, node):
        return (node.last_access,)

    def on_insert(self, node):
        self.hang_while_the_flag_is_there()

    def hang_while_the_flag_is_there(self):
        while self.flag.exists():
            time.sleep(0.02)


@hookimpl
def provide_eviction_strategies():
    flag = Path(__file__).with_name("flag")
    return [Provider(name="hanging", summary="s", api_version=1, create=lambda options, context: Hanging(flag))]
"""
FAIL_AT_START = """
import os
import time
from pathlib import Path

while Path(__file__).with_name("hang").exists():
    time.sleep(0.02)
if Path(__file__).with_name("crash").exists():
    os._exit(9)
"""


def config(**server):
    return {"model": "demo", "memory": {"kv_tokens": 32768}, "server": server}


@contextmanager
def aged_server(folder, config, has_aged=True, **environment):
    """Run a server; if `has_aged`, it first serves requests that leave state behind in its processes."""
    with ServerProcess(ageable(config, folder), environment={"OMP_NUM_THREADS": "1"} | environment) as server:
        if has_aged:
            age(server.url, folder)
        yield server


@pytest.fixture(scope="module")
def full(request):
    """Whether all tests run."""
    return request.config.getoption("--full")


def complete(url, timeout=60.0):
    return requests.post(
        url + "/generate", json={"text": "2 plus 3", "sampling_params": {"max_new_tokens": 4}}, timeout=timeout
    )


def health(server):
    return requests.get(server.url + "/health", timeout=5)


def path_with(folder):
    """Return a PYTHONPATH that starts with a folder."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def sockets_of(pid):
    """Return the folders of the Unix sockets on which a process listens."""
    paths = [Path(c.laddr) for c in psutil.Process(pid).net_connections("unix") if c.laddr]
    return {path.parent for path in paths if path.parent.name.startswith("graftlm-")}


class Stream(threading.Thread):
    """Reads one streamed request to its end, with or without an error."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url = url
        self.num_chunks = 0
        self.events, self.error, self.ended_s, self.status = [], None, None, None
        self.start()

    def run(self):
        try:
            with requests.post(self.url + "/generate", json=LONG | {"stream": True}, stream=True, timeout=60) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.num_chunks += 1
                        self.events.append(line.decode())
        except requests.RequestException as error:
            self.error = error
        self.ended_s = time.monotonic()

    @property
    def is_error(self):
        return self.error is not None or self.status == 503 or any('"error"' in event for event in self.events[-2:])


@pytest.fixture(scope="module")
def hang_flag(tmp_path_factory):
    """While this file exists, the eviction strategy of `hanging_plugin`, in the same folder, hangs."""
    folder = tmp_path_factory.mktemp("hanging")
    (folder / "hanging_plugin.py").write_text(HANGING_PLUGIN)
    return folder / "flag"


@contextmanager
def hanging_server(folder, hang_flag, restart):
    """Run a server that quickly reports a process that hangs, with the plugin that hangs."""
    plugin = {"plugins": {"modules": ["hanging_plugin"]}, "cache": {"eviction": "hanging"}}
    values = config(restart=restart, watchdog_s=1.0) | plugin
    with aged_server(folder, values, PYTHONPATH=path_with(hang_flag.parent)) as server:
        yield server


@pytest.fixture(scope="module")
def restarting(hang_flag, tmp_path_factory):
    """A server that restarts its processes, and quickly reports one that hangs."""
    with hanging_server(tmp_path_factory.mktemp("restarting"), hang_flag, restart=True) as server:
        yield server


@pytest.fixture(scope="module")
def watchful(hang_flag, tmp_path_factory):
    """The same server, but without restarts."""
    with hanging_server(tmp_path_factory.mktemp("watchful"), hang_flag, restart=False) as server:
        yield server


@pytest.fixture
def either(request):
    """A server that restarts its processes, or one that does not."""
    return request.getfixturevalue(request.param)


with_restart_on_and_off = pytest.mark.parametrize(
    "either", ["restarting", pytest.param("watchful", marks=pytest.mark.full)], indirect=True
)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory, full):
    """A server with a request timeout close to zero and without restarts."""
    values = config(request_timeout_s=REQUEST_LIMIT_S if full else QUICK_REQUEST_LIMIT_S)
    with aged_server(tmp_path_factory.mktemp("impatient"), values, full) as server:
        yield server


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="restart"), pytest.param(False, id="no-restart", marks=pytest.mark.full)],
)
def crowded(request, tmp_path_factory, full):
    """A server that runs two requests, and lets three wait."""
    limits = {"scheduling": {"max_running_requests": 2, "max_queued_requests": 3}}
    with aged_server(tmp_path_factory.mktemp("crowded"), config(restart=request.param) | limits, full) as server:
        yield server


def num_requests(server):
    """Return the number of prompts that have not ended."""
    return sum(load["num_reqs"] for load in requests.get(server.url + "/get_load", timeout=5).json())


@pytest.mark.parametrize("victim", ["scheduler-0", "detokenizer"])
def test_after_kill_9_under_load_every_request_ends_within_5_s_and_the_next_succeeds(restarting, victim):
    streams = [Stream(restarting.url) for _ in range(24)]
    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(requests.post, restarting.url + "/generate", json=LONGER, timeout=60) for _ in range(8)]
        # A request that arrives after the kill would wait for the new process, and succeed.
        wait_until(lambda: num_requests(restarting) == len(streams) + len(plain))
        wait_until(lambda: sum(stream.num_chunks > 2 for stream in streams) >= 16)
        os.kill(restarting.children()[victim], signal.SIGKILL)
        killed_s = time.monotonic()
        for stream in streams:
            stream.join(10)
        assert all(stream.is_error for stream in streams)
        assert max(stream.ended_s for stream in streams) - killed_s < 5
        assert {future.result().status_code for future in plain} <= {503}
        assert time.monotonic() - killed_s < 6
    bring_back(restarting)
    answer = complete(restarting.url)
    assert answer.status_code == 200, answer.text
    assert health(restarting).status_code == 200


@with_restart_on_and_off
def test_a_stopped_process_is_reported_with_its_stacks_and_again_when_it_continues(either):
    told_before = either.log.count("scheduler-0 answers again")
    os.kill(either.children()["scheduler-0"], signal.SIGSTOP)
    wait_until(lambda: health(either).status_code == 503)
    assert "scheduler-0 has not answered" in health(either).text
    os.kill(either.children()["scheduler-0"], signal.SIGCONT)
    wait_until(lambda: health(either).status_code == 200)
    wait_until(lambda: either.log.count("scheduler-0 answers again") > told_before)
    assert complete(either.url).status_code == 200


@with_restart_on_and_off
def test_a_hanging_step_is_reported_with_the_line_that_hangs(either, hang_flag):
    assert complete(either.url).status_code == 200
    hang_flag.touch()
    try:
        stream = Stream(either.url)
        wait_until(lambda: "hang_while_the_flag_is_there" in either.log)
        assert "the stacks of its threads" in either.log
        assert health(either).status_code == 503
    finally:
        hang_flag.unlink()
    wait_until(lambda: health(either).status_code == 200)
    stream.join(60)
    assert not stream.is_error


@with_restart_on_and_off
def test_sigterm_lets_requests_finish_and_refuses_new_ones(either):
    stream = Stream(either.url)
    wait_until(lambda: stream.num_chunks > 2)
    either.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "no new requests" in either.log)
    assert complete(either.url, 10).status_code == 503
    assert health(either).status_code == 503
    stream.join(60)
    assert not stream.is_error
    assert json.loads(stream.events[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "length"
    assert either.process.wait(20) == 0


@pytest.mark.parametrize("restart", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_second_sigterm_stops_at_once(restart, tmp_path, full):
    with aged_server(tmp_path, config(restart=restart), full) as server:
        streams = [Stream(server.url) for _ in range(8)]
        wait_until(lambda: all(stream.num_chunks > 2 for stream in streams))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "no new requests" in server.log)
        server.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        server.process.wait(20)
        assert time.monotonic() - start < 10
        for stream in streams:
            stream.join(10)
            assert stream.ended_s is not None
        assert "Traceback" not in server.log


def test_a_request_that_times_out_is_a_408(impatient):
    body = {"text": "Tell me a story", "sampling_params": LONGER["sampling_params"] | {"n": 64}}
    answer = requests.post(impatient.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 408
    assert "timed out" in answer.json()["error"]["message"]


def test_without_restart_health_reports_the_dead_process_and_the_server_exits_with_1(impatient):
    for victim in ("detokenizer", "scheduler-0"):
        os.kill(impatient.children()[victim], signal.SIGKILL)
        wait_until(lambda victim=victim: f"{victim} died: killed by SIGKILL" in health(impatient).text, 5)
        assert health(impatient).status_code == 503
        refused = complete(impatient.url)
        assert refused.status_code == 503
        assert f"{victim} died" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) > 0
    assert impatient.process.wait(20) == 1


@pytest.mark.full  # tests/processes/test_launcher.py starts processes that fail, without a server
def test_a_process_that_hangs_at_its_start_is_reported_and_failing_starts_are_limited(tmp_path, full):
    (tmp_path / "sitecustomize.py").write_text(FAIL_AT_START)  # every interpreter imports it first
    with aged_server(tmp_path, config(restart=True), PYTHONPATH=path_with(tmp_path)) as server:
        (tmp_path / "hang").touch()
        victims = ("scheduler-0", "detokenizer")
        for pid in [server.children()[name] for name in victims]:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(server.log.count(f"{name} runs as pid") == 2 for name in victims))
        assert health(server).status_code == 503
        (tmp_path / "hang").unlink()
        bring_back(server)
        assert complete(server.url).status_code == 200

        (tmp_path / "crash").touch()
        os.kill(server.children()["scheduler-0"], signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, server.url)
            # Three more starts, on a machine that may be busy.
            wait_until(lambda: "server.restart is false or the restart failed" in server.log, 120)
            assert server.stop() == 1  # the signal only shortens the time in which /health reports the failure
            assert waiting.result().status_code == 503
        assert server.log.count("scheduler-0 runs as pid") == 5
        assert "exit status 9" in server.log


def test_sigterm_ends_a_server_whose_processes_hang_at_their_start(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nwhile 'graftlm.processes' in sys.orig_argv: time.sleep(1)"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", "from graftlm.cli import main; main()", "serve", "--model", "demo"]
    environment = os.environ | {"PYTHONPATH": path_with(tmp_path)}
    with log.open("wb") as file, subprocess.Popen([*command, "--port", "0"], stderr=file, env=environment) as process:
        try:
            wait_until(lambda: log.read_text().count("runs as pid") == 2)
            pids = [child.pid for child in psutil.Process(process.pid).children()]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_an_overloaded_server_answers_429_and_serves_its_accepted_requests(crowded):
    body = {"text": "x", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: requests.post(crowded.url + "/generate", json=body, timeout=60), range(24)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) > 0
    assert "max_queued_requests" in refused.json()["error"]["message"]
    client = openai.OpenAI(base_url=crowded.url + "/v1", api_key="none", max_retries=0)
    assert client.completions.create(model="demo", prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_the_child_processes_end_when_main_is_killed(crowded):
    assert set(crowded.children()) == {"scheduler-0", "detokenizer"}
    folders = {path for pid in crowded.children().values() for path in sockets_of(pid)}
    assert folders
    crowded.process.kill()
    crowded.process.wait()
    wait_until(lambda: not crowded.children(), 15)
    assert not any(folder.exists() for folder in folders)
