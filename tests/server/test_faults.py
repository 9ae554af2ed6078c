"""What happens to requests when a process is killed, hangs, or is told to end."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
import requests

from graftlm.testing.server_process import ServerProcess, wait_until

QUICK = {"environment": {"OMP_NUM_THREADS": "1"}}
LONG = {"text": "Tell me a story", "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}


def config(**server):
    return {"model": "demo", "memory": {"kv_tokens": 32768}, "server": server}


def complete(url, timeout=60.0):
    return requests.post(
        url + "/generate", json={"text": "2 plus 3", "sampling_params": {"max_new_tokens": 4}}, timeout=timeout
    )


def sockets_of(pid):
    """Return the folders of the Unix sockets that a process listens on."""
    paths = [Path(c.laddr) for c in psutil.Process(pid).net_connections("unix") if c.laddr]
    return {path.parent for path in paths if path.parent.name.startswith("graftlm-")}


class Stream(threading.Thread):
    """Reads one streamed request to its end, whatever that is."""

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


@pytest.mark.parametrize("victim", ["scheduler-0", "detokenizer"])
def test_after_kill_9_under_load_every_request_ends_within_5_s_and_the_next_succeeds(victim):
    with ServerProcess(config(restart=True), **QUICK) as server:
        streams = [Stream(server.url) for _ in range(24)]
        with ThreadPoolExecutor(8) as pool:
            plain = [pool.submit(requests.post, server.url + "/generate", json=LONG, timeout=60) for _ in range(8)]
            wait_until(lambda: sum(stream.num_chunks > 2 for stream in streams) >= 16)
            os.kill(server.children()[victim], signal.SIGKILL)
            killed_s = time.monotonic()
            for stream in streams:
                stream.join(10)
            assert all(stream.is_error for stream in streams)
            assert max(stream.ended_s for stream in streams) - killed_s < 5
            assert {future.result().status_code for future in plain} <= {503}
            assert time.monotonic() - killed_s < 6
        answer = complete(server.url)
        assert answer.status_code == 200, answer.text
        wait_until(lambda: requests.get(server.url + "/health", timeout=5).status_code == 200)
        assert server.stop() == 0


def test_without_restart_health_says_so_and_the_server_exits_with_1():
    with ServerProcess(config(), **QUICK) as server:
        os.kill(server.children()["scheduler-0"], signal.SIGKILL)
        wait_until(lambda: requests.get(server.url + "/health", timeout=5).status_code == 503, 5)
        assert "killed by SIGKILL" in requests.get(server.url + "/health", timeout=5).text
        refused = complete(server.url)
        assert refused.status_code == 503
        assert "scheduler-0 died" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) > 0
        assert server.process.wait(20) == 1


def test_a_stuck_process_is_reported_with_its_stacks_and_when_it_moves_again():
    with ServerProcess(config(watchdog_s=1.0), **QUICK) as server:
        os.kill(server.children()["scheduler-0"], signal.SIGSTOP)
        wait_until(lambda: requests.get(server.url + "/health", timeout=5).status_code == 503)
        assert "scheduler-0 has not moved" in requests.get(server.url + "/health", timeout=5).text
        os.kill(server.children()["scheduler-0"], signal.SIGCONT)
        wait_until(lambda: requests.get(server.url + "/health", timeout=5).status_code == 200)
        wait_until(lambda: "scheduler-0 moves again" in server.log)
        assert complete(server.url).status_code == 200


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


def test_a_hanging_step_is_reported_with_the_line_that_hangs(tmp_path):
    (tmp_path / "hanging_plugin.py").write_text(HANGING_PLUGIN)
    flag = tmp_path / "flag"
    settings = config(watchdog_s=1.0) | {"plugins": {"modules": ["hanging_plugin"]}, "cache": {"eviction": "hanging"}}
    with ServerProcess(settings, environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}) as server:
        assert complete(server.url).status_code == 200
        flag.touch()
        stream = Stream(server.url)
        wait_until(lambda: "the stacks of its threads" in server.log)
        assert "hang_while_the_flag_is_there" in server.log
        assert requests.get(server.url + "/health", timeout=5).status_code == 503
        flag.unlink()
        wait_until(lambda: requests.get(server.url + "/health", timeout=5).status_code == 200)
        stream.join(60)
        assert not stream.is_error


def test_a_process_that_cannot_start_again_is_not_tried_for_ever(tmp_path):
    (tmp_path / "crashing_plugin.py").write_text(
        "import os\nfrom pathlib import Path\nif Path(__file__).with_name('flag').exists():\n    os._exit(9)\n"
    )
    settings = config(restart=True) | {"plugins": {"modules": ["crashing_plugin"]}}
    with ServerProcess(settings, environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}) as server:
        (tmp_path / "flag").touch()
        os.kill(server.children()["scheduler-0"], signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, server.url)
            assert server.process.wait(60) == 1
            assert waiting.result().status_code == 503
        assert server.log.count("scheduler-0 runs as pid") == 4
        assert "exit status 9" in server.log


def test_sigterm_lets_requests_end_and_refuses_new_ones():
    with ServerProcess(config(), **QUICK) as server:
        stream = Stream(server.url)
        wait_until(lambda: stream.num_chunks > 2)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "no new requests" in server.log)
        assert complete(server.url, 10).status_code == 503
        assert requests.get(server.url + "/health", timeout=5).status_code == 503
        stream.join(60)
        assert not stream.is_error
        assert json.loads(stream.events[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "length"
        assert server.process.wait(20) == 0


def test_a_second_sigterm_stops_at_once():
    with ServerProcess(config(), **QUICK) as server:
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


def test_when_main_is_killed_its_children_end():
    with ServerProcess(config(), **QUICK) as server:
        assert set(server.children()) == {"scheduler-0", "detokenizer"}
        folders = {path for pid in server.children().values() for path in sockets_of(pid)}
        assert folders
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not server.children(), 15)
        assert not any(folder.exists() for folder in folders)


def test_an_overloaded_server_answers_429_and_serves_what_it_has_taken():
    small = config() | {"scheduling": {"max_running_requests": 2, "max_queued_requests": 3}}
    with ServerProcess(small, **QUICK) as server, ThreadPoolExecutor(24) as pool:
        body = {"text": "x", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
        answers = list(pool.map(lambda _: requests.post(server.url + "/generate", json=body, timeout=60), range(24)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["Retry-After"]) > 0
        assert "max_queued_requests" in refused.json()["error"]["message"]
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert client.completions.create(model="demo", prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_a_request_that_takes_too_long_is_a_408():
    with ServerProcess(config(request_timeout_s=0.2), **QUICK) as server:
        answer = requests.post(server.url + "/generate", json=LONG, timeout=60)
        assert answer.status_code == 408
        assert "timed out" in answer.json()["error"]["message"]
