"""Kills a server's processes at random under mixed load, and checks that every request ends with a correct answer or a
clear error.

python tests/server/kill_storm.py [--kills 200] [--seed 0] [--minutes 60 --kill-every-s 60] [--clients 6]

Two replicas of the bundled model answer grammars, adapters, several completions, streams and requests that clients
leave or abort, while weights are replaced and adapters are loaded. After every kill the server must be healthy within a
limit. Every request must end with an answer or a clear error, and a greedy answer must equal the one recorded before.
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests
from rich.console import Console

from graftlm.demo import demo_checkpoint
from graftlm.testing.aged_server import age, ageable, call, rolled_norm, write_random_adapter
from graftlm.testing.server_process import ServerProcess, wait_until

CONFIG = {
    "model": {"path": "demo", "context_len": 512},
    "memory": {"kv_tokens": 16384},
    "lora": {"enabled": True, "max_rank": 8, "max_loaded": 8},
    "parallel": {"data": 2},
    "server": {"restart": True, "watchdog_s": 2.0, "log_level": "info"},
}
#: A client's timeout, in seconds. A request that takes longer counts as hanging.
REQUEST_LIMIT_S = 120.0
#: Within how many seconds a server must be healthy after a kill.
RECOVERY_LIMIT_S = 90.0
#: By how many bytes, in addition to 10 %, the main process may grow over the last three quarters of a run.
MEMORY_SLACK = 16 << 20
#: Statuses that are not failures: the server refuses the request, or cannot serve it, and its error states the reason.
CLEAR_ERRORS = {429, 503}
#: name -> by how many places the last norm is rolled. Answers are compared with answers of the same weights.
VERSIONS = {"default": 0, "rolled": 1}
SCHEMA = {"type": "object", "properties": {"day": {"enum": ["Monday", "Friday"]}, "n": {"type": "integer"}}}
PROMPTS = ("2 plus 3 is", "The capital of France is", "Which day comes after Thursday?", "Once upon a time")


@dataclass(frozen=True)
class GreedyRequest:
    """One kind of greedy request with a known answer.

    Attributes:
        name: name of the kind, for the table.
        body: body of the request to /generate.
    """

    name: str
    body: dict

    @property
    def key(self):
        return json.dumps(self.body, sort_keys=True)


def make_greedy_requests(prompts):
    """Return every greedy request that the clients send."""
    kinds = {
        "plain": {},
        "json_schema": {"json_schema": json.dumps(SCHEMA | {"required": ["day", "n"], "additionalProperties": False})},
        "regex": {"regex": "[0-9]{1,4}( is [a-z]{2,8})?"},
        "ebnf": {"ebnf": 'root ::= "yes" | "no" | "perhaps " root'},
    }
    found = []
    for text, (name, grammar), adapter in itertools.product(prompts, kinds.items(), (None, "kept")):
        sampling = {"temperature": 0, "max_new_tokens": 32} | grammar
        body = {"text": text, "sampling_params": sampling} | ({"lora_path": adapter} if adapter else {})
        found.append(GreedyRequest(name if adapter is None else f"{name}+adapter", body))
    return found


@dataclass
class Report:
    """The result of a run.

    Attributes:
        outcomes: number of requests by (kind, outcome).
        failures: descriptions of all failures.
        memory: (seconds since the start, process, bytes resident), in order.
        recovery_s: how long each kill kept the server unhealthy.
    """

    outcomes: Counter = field(default_factory=Counter)
    failures: list = field(default_factory=list)
    memory: list = field(default_factory=list)
    recovery_s: list = field(default_factory=list)
    faults: Counter = field(default_factory=Counter)
    num_sent: int = 0
    num_ended: int = 0
    exit_status: int | None = None
    longest_s: float = 0.0

    @property
    def num_requests(self):
        return sum(self.outcomes.values())


class Storm:
    """Clients that send requests, and a thread that kills processes."""

    def __init__(self, server, folder, seed, num_clients, prompts=PROMPTS):
        self.server, self.folder = server, folder
        self.report = Report()
        self._rng = random.Random(seed)
        self._seed = seed
        self._greedy_requests = make_greedy_requests(prompts)
        self._expected = {}
        self._norms = {name: rolled_norm("demo", shift) for name, shift in VERSIONS.items()}
        self._version = "default"
        self._killed = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._start_s = time.monotonic()
        self._clients = [
            threading.Thread(target=self._send_requests, args=(i,), daemon=True) for i in range(num_clients)
        ]
        self._others = [threading.Thread(target=self._load_adapters, daemon=True)]

    # -- before the kills ----------------------------------------------------------------------------------------------

    def record(self):
        """Record the answer to every greedy request, for every version of the weights."""
        call(self.server.url, "/load_lora_adapter", self._adapter("kept", 7))
        for version in reversed(VERSIONS):
            self._update(version)
            for request in self._greedy_requests:
                self._expected[version, request.key] = call(self.server.url, "/generate", request.body)["output_ids"]
        differing = sum(
            self._expected["default", a.key] != self._expected["rolled", a.key] for a in self._greedy_requests
        )
        assert differing > 0, "the versions must be told apart by their answers"

    # -- the kills -----------------------------------------------------------------------------------------------------

    def run(self, num_kills, kill_every_s=None, end_s=None, advance=lambda: None):
        """Kill `num_kills` times, or until the monotonic clock reaches `end_s`."""
        self.note_memory()
        for thread in (*self._clients, *self._others):
            thread.start()
        try:
            for _ in range(num_kills):
                self._stop.wait(self._rng.uniform(0.05, 1.5) if kill_every_s is None else kill_every_s)
                if end_s is not None and time.monotonic() > end_s:
                    break
                if not self._hurt():
                    break
                advance()
        finally:
            self._stop.set()
            for thread in (*self._clients, *self._others):
                thread.join(REQUEST_LIMIT_S + 30)
                if thread.is_alive():
                    self.fail("a client hangs")
        self._settle()

    def _hurt(self):
        """Kill or stop a process, sometimes replace weights, and wait for health; return whether the server became
        healthy.
        """
        victim = self._rng.choice(["scheduler-0", "scheduler-1", "detokenizer"])
        pid = self._pids().get(victim)
        if pid is None:
            return self._recover()
        start_s = time.monotonic()
        how = self._rng.choice(["SIGKILL", "SIGKILL", "SIGSTOP, SIGCONT", "SIGSTOP, SIGKILL", "SIGKILL while starting"])
        self.report.faults[f"{victim.split('-')[0]}: {how}"] += 1
        with suppress(ProcessLookupError):  # the process has already ended, which `_recover` notices
            if how.startswith("SIGSTOP"):
                os.kill(pid, signal.SIGSTOP)
                self._stop.wait(self._rng.uniform(0.0, 3.0))
                if how.endswith("KILL"):
                    self._kill(pid)
                else:
                    os.kill(pid, signal.SIGCONT)
            else:
                self._kill(pid)
            if how.endswith("starting"):
                with suppress(TimeoutError):
                    wait_until(lambda: self._pids().get(victim, pid) != pid, 10)
                    self._kill(self._pids()[victim])
        if self._rng.random() < 0.3:  # at a random time during the recovery
            with suppress(RuntimeError, OSError):
                self._update(self._rng.choice(list(VERSIONS)), self._rng.random() < 0.3)
        lives = self._recover()
        self.report.recovery_s.append(time.monotonic() - start_s)
        self.note_memory()
        return lives

    def _kill(self, pid):
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def _recover(self):
        """Wait until every process runs, all killed processes have ended, and the server is healthy; return whether
        it is.
        """
        end_s = time.monotonic() + RECOVERY_LIMIT_S
        while time.monotonic() < end_s:
            with suppress(requests.RequestException, RuntimeError, OSError):
                answer = requests.get(self.server.url + "/health", timeout=10)
                pids = self._pids()
                is_whole = len(pids) == 1 + CONFIG["parallel"]["data"] and self._killed.isdisjoint(pids.values())
                if "current weights" in answer.text:
                    self._update(self._version)
                elif (
                    is_whole
                    and answer.status_code == 200
                    and "died" not in answer.text
                    and "not answered" not in answer.text
                ):
                    call(self.server.url, "/generate", self._greedy_requests[0].body)
                    return True
            time.sleep(0.05)
        self.fail(f"not healthy {RECOVERY_LIMIT_S:.0f} s after a fault: {self._health()}\n{self.server.log[-3000:]}")
        return False

    def _update(self, version, abort_all=False):
        query = f"?weight_version={version}&abort_all_requests={str(abort_all).lower()}"
        call(self.server.url, f"/update_weights_from_tensor{query}", self._norms[version])
        self._version = version

    def _load_adapters(self):
        """Load, use and unload adapters until the run ends."""
        rng, number = random.Random(self._seed + 1000), 0
        while not self._stop.is_set():
            number += 1
            name = f"passing-{number}"
            status, _ = self._post("/load_lora_adapter", self._adapter(name, rng.randrange(5)))
            self.note("load adapter", status)
            body = {"text": "Red, green,", "sampling_params": {"max_new_tokens": 16}, "lora_path": name}
            status, _ = self._post("/generate", body)
            self.note("passing adapter", status, allowed={404})
            status, _ = self._post("/unload_lora_adapter", {"lora_name": name})
            self.note("unload adapter", status, allowed={404})
            self._stop.wait(rng.uniform(0.1, 0.6))

    def _adapter(self, name, seed):
        path = write_random_adapter(self.folder / f"adapter-{seed}", demo_checkpoint(), seed)
        return {"lora_name": name, "lora_path": str(path)}

    # -- clients -------------------------------------------------------------------------------------------------------

    def _send_requests(self, index):
        rng = random.Random(f"{self._seed} {index}")
        kinds = [self._greedy] * 6 + [self._stream] * 2 + [self._several, self._leave, self._abort]
        while not self._stop.is_set():
            with self._lock:
                self.report.num_sent += 1
            try:
                rng.choice(kinds)(rng)
            except Exception as error:  # a client must continue, and its error must be reported
                self.fail(f"a client failed: {type(error).__name__}: {error}")
            with self._lock:
                self.report.num_ended += 1

    def _greedy(self, rng):
        request = rng.choice(self._greedy_requests)
        status, answer = self._post("/generate", request.body)
        self._check(request, request.name, status, answer)

    def _stream(self, rng):
        request = rng.choice(self._greedy_requests)
        name = f"stream {request.name}"
        try:
            with requests.post(
                self.server.url + "/generate",
                json=request.body | {"stream": True},
                stream=True,
                timeout=REQUEST_LIMIT_S,
            ) as answer:
                if answer.status_code != 200:
                    self.note(name, answer.status_code)
                    return
                events = deque((line for line in answer.iter_lines() if line), maxlen=2)
        except requests.RequestException as error:
            self.note(name, type(error).__name__)
            return
        if not events or events[-1] != b"data: [DONE]":
            self.note(name, "cut off")
            return
        last = json.loads(events[0].removeprefix(b"data: "))
        if "error" in last:
            self.note(name, "error event")
        else:
            self._check(request, name, 200, last)

    def _several(self, rng):
        sampling = {"n": rng.randrange(2, 5), "max_new_tokens": 24, "temperature": 1.0, "regex": "[a-z ]{1,30}"}
        status, answers = self._post("/generate", {"text": rng.choice(PROMPTS), "sampling_params": sampling})
        if status == 200 and len(answers) != sampling["n"]:
            self.fail(f"n: {len(answers)} answers of {sampling['n']}")
        self.note("n > 1", status)

    def _leave(self, rng):
        """Close the connection after a few events, or before the first one."""
        body = {"text": rng.choice(PROMPTS), "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
        url, options = self.server.url + "/generate", {"stream": True, "timeout": REQUEST_LIMIT_S}
        with suppress(requests.RequestException), requests.post(url, json=body | {"stream": True}, **options) as answer:
            deque(itertools.islice(answer.iter_lines(), rng.randrange(6)), maxlen=0)
        self.note("left by the client", "left")

    def _abort(self, rng):
        rid = f"{rng.random():.17f}"
        body = {"text": rng.choice(PROMPTS), "rid": rid, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
        timer = threading.Timer(rng.uniform(0.0, 0.3), self._post, ("/abort_request", {"rid": rid}))
        timer.start()
        status, answer = self._post("/generate", body)
        timer.join()
        kind = answer["meta_info"]["finish_reason"]["type"] if status == 200 else status
        self.note("aborted", kind if kind != "length" else 200)

    def _post(self, path, body):
        """Return the status and the JSON body; without an answer, the name of the error instead of the status."""
        start_s = time.monotonic()
        try:
            answer = requests.post(self.server.url + path, json=body, timeout=REQUEST_LIMIT_S)
            return answer.status_code, answer.json()
        except (requests.RequestException, ValueError) as error:
            return type(error).__name__, {"error": {"message": str(error)}}
        finally:
            with self._lock:
                self.report.longest_s = max(self.report.longest_s, time.monotonic() - start_s)

    def _check(self, request, name, status, answer):
        if status != 200:
            self.note(name, status)
            return
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":  # an update of the weights ended the request
            self.note(name, "abort")
            return
        expected = self._expected[meta["weight_version"], request.key]
        if answer["output_ids"] != expected:
            self.fail(
                f"{name}, weights {meta['weight_version']}: {answer['output_ids']}, expected {expected}: {request.body}"
            )
        self.note(name, 200)

    # -- records -------------------------------------------------------------------------------------------------------

    def note(self, kind, outcome, allowed=frozenset()):
        """Count an outcome of a request; an outcome that is neither an answer nor a clear error is a failure."""
        good = {200, "abort", "left", "error event"} | CLEAR_ERRORS | set(allowed)
        with self._lock:
            self.report.outcomes[kind, str(outcome)] += 1
        if outcome not in good:
            self.fail(f"{kind}: {outcome}")

    def fail(self, text):
        with self._lock:
            self.report.failures.append(f"{time.monotonic() - self._start_s:.1f} s: {text}")

    def _pids(self):
        """Return name -> process id of main's child processes. The name is the last word of the command line."""
        found = {}
        for process in psutil.Process(self.server.process.pid).children():
            with suppress(psutil.Error, IndexError):
                found[process.cmdline()[-1]] = process.pid
        return found

    def note_memory(self):
        """Record the resident memory of every process."""
        now_s = time.monotonic() - self._start_s
        for name, pid in ({"main": self.server.process.pid} | self._pids()).items():
            with suppress(psutil.Error):
                self.report.memory.append((now_s, name, pid, psutil.Process(pid).memory_info().rss))

    # -- after the kills -----------------------------------------------------------------------------------------------

    def _settle(self):
        """Check that no request or page is left, and that answers are as before."""
        if not self._recover():
            return
        for request in self._greedy_requests:
            status, answer = self._post("/generate", request.body)
            self._check(request, f"{request.name}, at the end", status, answer)
        loads = []

        def is_idle():
            loads[:] = requests.get(self.server.url + "/get_load", timeout=10).json()
            return all(load["num_reqs"] == load["num_held_reqs"] == load["num_pages"] == 0 for load in loads)

        try:
            wait_until(is_idle, 30)
        except TimeoutError:
            self.fail(f"not idle at the end: {loads}")
        self.note_memory()

    def _health(self):
        try:
            return requests.get(self.server.url + "/health", timeout=10).text
        except requests.RequestException as error:
            return f"{type(error).__name__}: {error}"


def main_memory(report):
    """Return main's resident bytes after a quarter of the run and at its end."""
    values = [rss for _, name, _, rss in report.memory if name == "main"]
    return values[len(values) // 4], values[-1]


def storm(num_kills, seed, num_clients=6, kill_every_s=None, minutes=None, advance=lambda: None, prompts=PROMPTS):
    """Run a server, and kill its processes; return the report."""
    with tempfile.TemporaryDirectory(prefix="graftlm-storm-") as name:
        folder = Path(name)
        with ServerProcess(ageable(CONFIG, folder), environment={"OMP_NUM_THREADS": "1"}) as server:
            age(server.url, folder)
            it = Storm(server, folder, seed, num_clients, prompts)
            it.record()
            end_s = None if minutes is None else time.monotonic() + 60 * minutes
            it.run(num_kills if minutes is None else sys.maxsize, kill_every_s, end_s, advance)
            try:
                it.report.exit_status = server.stop(60)
            except Exception as error:
                it.fail(f"no end on SIGTERM: {error}")
            if it.report.exit_status != 0:
                it.fail(f"exit status {it.report.exit_status} on SIGTERM")
            for line in ("Traceback", "could not be handled"):
                if line in server.log:
                    it.fail(f"the log has {line!r}: {server.log[server.log.index(line) - 500 :][:3000]}")
    report = it.report
    early, late = main_memory(report)
    if late > early * 1.1 + MEMORY_SLACK:
        it.fail(f"main grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
    if report.num_sent != report.num_ended:
        it.fail(f"{report.num_sent - report.num_ended} requests were lost")
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--minutes", type=float, help="duration of the run, instead of a number of kills")
    parser.add_argument(
        "--kill-every-s", type=float, help="seconds from a recovery to the next kill; default: up to 1.5"
    )
    arguments = parser.parse_args()
    console = Console()
    start_s, num_done = time.monotonic(), itertools.count(1)

    def advance():
        number = next(num_done)
        if number % 20 == 0 or arguments.kill_every_s:
            console.print(f"{time.monotonic() - start_s:6.0f} s: {number} kills", highlight=False)

    report = storm(
        arguments.kills, arguments.seed, arguments.clients, arguments.kill_every_s, arguments.minutes, advance
    )
    print_report(console, report, time.monotonic() - start_s)
    sys.exit(bool(report.failures))


def print_report(console, report, seconds):
    def line(text):
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for (kind, outcome), count in sorted(report.outcomes.items()):
        line(f"{count:7} {outcome:12} {kind}")
    for fault, count in sorted(report.faults.items()):
        line(f"{count:7} {fault}")
    times = sorted({at_s for at_s, *_ in report.memory})
    shown = set(times[:: max(1, len(times) // 30)]) | {times[-1]}
    for at_s, name, pid, rss in report.memory:
        if at_s in shown:
            line(f"{at_s:8.0f} s {name:12} pid {pid:7} {rss / 2**20:8.1f} MiB")
    early, late = main_memory(report)
    line(f"main: {early / 2**20:.1f} MiB after a quarter of the kills, {late / 2**20:.1f} MiB at the end")
    recovery_s = sorted(report.recovery_s) or [0.0]
    line(f"healthy again: median {recovery_s[len(recovery_s) // 2]:.1f} s, at most {recovery_s[-1]:.1f} s after a kill")
    line(f"longest request: {report.longest_s:.1f} s")
    num_kills, num_failures = sum(report.faults.values()), len(report.failures)
    line(
        f"{num_kills} kills, {report.num_requests} requests in {seconds:.0f} s, {num_failures} failures, "
        f"exit status {report.exit_status}"
    )
    for failure in report.failures[:20]:
        line(failure)


if __name__ == "__main__":
    main()
