"""Attacks a server without a key, one attack after the other, while a normal client measures its latency.

python tests/server/hostile_clients.py [--seconds 45] [--connections 1200] [--json FILE]

Everything goes over the loopback interface; bytes, connections and seconds of each attack are bounded.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from graftlm.testing.server_process import ServerProcess

CONFIG = {
    "model": {"path": "demo", "context_len": 256},
    "memory": {"kv_tokens": 8192},
    "server": {"log_level": "warning"},
}
#: The usual soft limit of open files of a login shell. The server starts with it.
SOFT_FILE_LIMIT = 1024
#: A normal request that takes longer counts as lost.
NORMAL_TIMEOUT_S = 30.0
PIECE = b"a" * 65536
#: The most bytes that one connection sends.
MAX_SENT_BYTES = 256 * 2**20

#: The Host of a web page whose name resolves to this machine, and other names that are not this server's.
FOREIGN_HOSTS = ("evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "10.1.2.3")
#: A request without a Host field.
MALFORMED_HOSTS = ("127.0.0.1@evil.example", "evil.example/127.0.0.1", "127.0.0.1:port", "[::1", "a b", "")
REFUSALS = {"host_not_allowed", "invalid_host"}
ANOTHER = "this server is not"


@dataclass
class Outcome:
    """The effect of one attack on the server.

    Attributes:
        rss_growth_mib: peak memory of the main process minus its memory before the attack.
        num_lost: normal requests without an answer in time.
        num_wrong: attacking requests that were served and should have been refused.
        num_left_open: connections that sent no complete request and were still open at the end.
        note: observations of the attack.
    """

    attack: str
    seconds: float = 0.0
    rss_growth_mib: float = 0.0
    max_latency_s: float = 0.0
    num_normal: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    num_left_open: int = 0
    note: str = ""


@dataclass
class Limits:
    """The bounds of each attack.

    Attributes:
        seconds: maximum duration of an attack.
        connections: number of connections of the attacks that open many.
        probes: concurrent requests for /health_generate.
        max_bytes: maximum number of bytes that one connection sends.
        paths: number of routes that are tried with foreign Hosts; 0 means all.
    """

    seconds: float = 45.0
    connections: int = 1200
    probes: int = 700
    max_bytes: int = MAX_SENT_BYTES
    paths: int = 0


@dataclass
class Site:
    """The server under attack."""

    url: str
    host: str = field(init=False)
    port: int = field(init=False)

    def __post_init__(self):
        parts = urlsplit(self.url)
        self.host, self.port = parts.hostname, parts.port

    async def connect(self):
        return await asyncio.open_connection(self.host, self.port)

    @property
    def name(self):
        return f"{self.host}:{self.port}".encode()


Attack = Callable[[Site, Limits, Outcome], Awaitable[None]]


async def _close(writer):
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


# -- attacks -----------------------------------------------------------------------------------------------------------


async def endless(site, limits, outcome, beginning, piece, num_connections=1):
    """Send the beginning, then one piece repeatedly, until the server closes the connection or a limit is reached."""
    taken, closed = 0, 0

    async def one():
        nonlocal taken, closed
        reader, writer = await site.connect()
        writer.write(beginning)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < limits.max_bytes // num_connections:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                taken += len(piece)
                if reader.at_eof() or writer.is_closing():
                    break
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(reader.read(), 0.5)
        closed += reader.at_eof() or reader.exception() is not None
        await _close(writer)

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(one() for _ in range(num_connections))), limits.seconds)
    outcome.note = f"{taken / 2**20:.0f} MiB sent, {closed} of {num_connections} closed by the server"


async def header_line(site, limits, outcome):
    await endless(site, limits, outcome, b"GET /model_info HTTP/1.1\r\nHost: " + site.name + b"\r\nA: ", PIECE)


async def header_lines(site, limits, outcome):
    lines = b"".join(b"X-%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(2000))
    await endless(site, limits, outcome, b"GET /model_info HTTP/1.1\r\nHost: " + site.name + b"\r\n", lines)


async def request_line(site, limits, outcome):
    await endless(site, limits, outcome, b"GET /", PIECE)


def _chunked(site):
    head = b"POST /generate HTTP/1.1\r\nHost: " + site.name + b"\r\nContent-Type: application/json\r\n"
    return head + b"Transfer-Encoding: chunked\r\n\r\n"


async def trailer_lines(site, limits, outcome):
    lines = b"".join(b"X-%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(2000))
    await endless(site, limits, outcome, _chunked(site) + b"1\r\n{\r\n0\r\n", lines)


async def trailer_line(site, limits, outcome):
    await endless(site, limits, outcome, _chunked(site) + b"1\r\n{\r\n0\r\nA: ", PIECE)


async def chunk_extension(site, limits, outcome):
    await endless(site, limits, outcome, _chunked(site) + b"1;a=", PIECE)


async def pipelining(site, limits, outcome):
    request = b"GET /model_info HTTP/1.1\r\nHost: " + site.name + b"\r\n\r\n"
    few = Limits(limits.seconds, limits.connections, limits.probes, limits.max_bytes // 8)
    await endless(site, few, outcome, request, request * 1000, num_connections=4)


async def _hold(site, limits, outcome, num_connections, beginning, piece):
    """Open connections and leave them idle, or send one piece per second; count those that the server keeps open."""
    opened, refused = [], 0
    end_s = time.monotonic() + limits.seconds
    for _ in range(num_connections):
        try:
            reader, writer = await asyncio.wait_for(site.connect(), max(0.1, end_s - time.monotonic()))
        except (OSError, TimeoutError):
            refused += 1
            continue
        writer.write(beginning)
        opened.append((reader, writer))
    drains = [asyncio.ensure_future(reader.read()) for reader, _ in opened]
    while time.monotonic() < end_s and not all(drain.done() for drain in drains):
        await asyncio.wait(drains, timeout=min(1.0, max(0.0, end_s - time.monotonic())))
        for (_, writer), drain in zip(opened, drains, strict=True):
            if piece and not drain.done():
                writer.write(piece)
    outcome.num_left_open = num_left = sum(not drain.done() for drain in drains)
    held_s = limits.seconds - (end_s - time.monotonic())
    for drain in drains:
        drain.cancel()
    await asyncio.gather(*drains, *(_close(writer) for _, writer in opened), return_exceptions=True)
    outcome.note = f"{len(opened)} opened, {refused} not accepted, {num_left} still open after {held_s:.0f} s"


async def half_open(site, limits, outcome):
    await _hold(site, limits, outcome, limits.connections, b"GET /model_info HTTP/1.1\r\nHost: ", b"")


async def idle(site, limits, outcome):
    await _hold(site, limits, outcome, limits.connections, b"", b"")


async def slow_headers(site, limits, outcome):
    await _hold(site, limits, outcome, limits.connections // 4, b"GET /model_info HTTP/1.1\r\nA: ", b"a")


async def slow_bodies(site, limits, outcome):
    head = b"POST /generate HTTP/1.1\r\nHost: " + site.name + b"\r\nContent-Type: application/json\r\n"
    beginning = head + b"Content-Length: 1000000\r\n\r\n{"
    await _hold(site, limits, outcome, limits.connections // 4, beginning, b" ")


async def health_generate(site, limits, outcome):
    request = b"GET /health_generate HTTP/1.1\r\nHost: " + site.name + b"\r\nConnection: close\r\n\r\n"

    async def one():
        reader, writer = await site.connect()
        writer.write(request)
        answer = await reader.read()
        await _close(writer)
        return answer.startswith(b"HTTP/1.1 200")

    start_s = time.monotonic()
    done = await asyncio.gather(*(one() for _ in range(limits.probes)), return_exceptions=True)
    outcome.note = f"{sum(it is True for it in done)} of {limits.probes} answered in {time.monotonic() - start_s:.2f} s"


def _operations(url):
    """Return (method, path) of every route: those of the OpenAPI document and of the dashboard, and both methods of
    flush_cache.
    """
    from graftlm.server.dashboard.pages import PAGE_PATHS

    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=NORMAL_TIMEOUT_S)
    connection.request("GET", "/openapi.json")
    document = json.loads(connection.getresponse().read())
    connection.close()
    found = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    found |= {("GET", path) for path in PAGE_PATHS}
    found |= {("GET", "/flush_cache"), ("GET", "/dashboard/state"), ("POST", "/dashboard/tree"), ("GET", "/metrics")}
    found |= {("GET", "/openapi.json"), ("GET", "/nowhere"), ("OPTIONS", "/generate"), ("HEAD", "/")}
    # While generation is paused, no request is answered.
    return sorted(found - {("POST", "/pause_generation")})


def _rebinding_requests(site, method, path):
    """Yield requests that a server on the loopback interface should refuse."""
    path = path.replace("{model}", "demo")
    line = f"{method} {path} HTTP/1.1\r\n"
    own = f"Host: {site.host}:{site.port}\r\n"
    for host in (*FOREIGN_HOSTS, *MALFORMED_HOSTS):
        yield line + f"Host: {host}\r\n".format(port=site.port)
    yield line
    yield line + own + "Host: evil.example\r\n"
    yield line + own + own
    yield f"{method} http://evil.example{path} HTTP/1.1\r\n{own}"


async def rebinding(site, limits, outcome):
    operations = await asyncio.to_thread(_operations, site.url)
    operations = operations[: limits.paths or None]
    num_sent, served = 0, set()
    for method, path in operations:
        for request in _rebinding_requests(site, method, path):
            reader, writer = await site.connect()
            end = "Connection: close\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
            writer.write((request + end).encode())
            answer = await asyncio.wait_for(reader.read(), NORMAL_TIMEOUT_S)
            await _close(writer)
            num_sent += 1
            if not _is_host_refusal(method, answer):
                outcome.num_wrong += 1
                served.add(f"{method} {path}")
    outcome.note = f"{num_sent} requests over {len(operations)} routes; served: {len(served)} routes"


def _is_host_refusal(method, answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12]
    if method == "HEAD":
        return status in (b"400", b"403")
    try:
        error = json.loads(body)["error"]
        # Anthropic's errors have no code.
        refuses = (
            error["code"] in REFUSALS if "code" in error else "Host" in error["message"] or ANOTHER in error["message"]
        )
        return status in (b"400", b"403") and refuses
    except (ValueError, KeyError, TypeError):
        return False


ATTACKS: tuple[Attack, ...] = (
    header_line,
    header_lines,
    request_line,
    trailer_line,
    trailer_lines,
    chunk_extension,
    pipelining,
    half_open,
    idle,
    slow_headers,
    slow_bodies,
    health_generate,
    rebinding,
)


# -- measurement of the attacks' cost ----------------------------------------------------------------------------------


def normal_client(url):
    """Send a small request every 50 ms over a separate connection until standard input ends; print the latencies."""
    import select

    netloc, number = urlsplit(url).netloc, 0
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        number += 1
        start_s = time.monotonic()
        connection = http.client.HTTPConnection(netloc, timeout=NORMAL_TIMEOUT_S)
        try:
            body = {"input_ids": [300 + number % 100], "sampling_params": {"max_new_tokens": 1}}
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            ok = answer.status == 200
        except (OSError, http.client.HTTPException):
            ok = False
        connection.close()
        print(json.dumps([time.monotonic() - start_s, ok]), flush=True)


@contextlib.contextmanager
def measured(server, outcome):
    """Measure the memory of the main process and the latency of a normal client while the block runs."""
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    client = subprocess.Popen(
        [sys.executable, __file__, "--normal-client", server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    lines = [json.loads(client.stdout.readline())]  # the client has started
    start_s = time.monotonic()
    watch = _PeakWatch(process)
    with watch:
        yield
        outcome.seconds = time.monotonic() - start_s
        lines += map(json.loads, client.communicate()[0].splitlines())
    outcome.rss_growth_mib = (watch.peak_bytes - before) / 2**20
    outcome.num_normal, outcome.num_lost = len(lines), sum(not ok for _, ok in lines)
    outcome.max_latency_s = max(latency_s for latency_s, _ in lines)


class _PeakWatch:
    """Reads a process's memory every 20 ms in a thread, and keeps the maximum."""

    def __init__(self, process):
        import threading

        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak_bytes = process.memory_info().rss

    def _run(self):
        while not self._ended.wait(0.02):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.peak_bytes = max(self.peak_bytes, self._process.memory_info().rss)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._ended.set()
        self._thread.join()


def run(server, attacks=ATTACKS, limits=None):
    """Run attacks against a server, one after the other; return the outcome of each."""
    limits = limits or Limits()
    outcomes = []
    for attack in attacks:
        outcome = Outcome(attack.__name__)
        with measured(server, outcome):
            asyncio.run(attack(Site(server.url), limits, outcome))
        outcomes.append(outcome)
    return outcomes


def num_files(server):
    """Return the number of files that a server's main process has open."""
    return psutil.Process(server.process.pid).num_fds()


def starve(server, num_connections, seconds):
    """Hold connections that a server cannot accept; return the CPU time of its main process as a share of one core."""
    process, site = psutil.Process(server.process.pid), Site(server.url)
    outcome = Outcome("starve")
    before_s, start_s = sum(process.cpu_times()[:2]), time.monotonic()
    asyncio.run(_hold(site, Limits(seconds), outcome, num_connections, b"GET /", b""))
    return (sum(process.cpu_times()[:2]) - before_s) / (time.monotonic() - start_s)


@contextlib.contextmanager
def file_limit(soft):
    """Set the soft limit of open files that processes started in the block inherit."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=45.0, help="maximum duration of each attack")
    parser.add_argument("--connections", type=int, default=1200)
    parser.add_argument("--attack", action="append", choices=[attack.__name__ for attack in ATTACKS])
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--normal-client", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.normal_client:
        normal_client(arguments.normal_client)
        return
    with file_limit(SOFT_FILE_LIMIT):
        server = ServerProcess(CONFIG, environment={"OMP_NUM_THREADS": "1"})
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    console = Console(width=150)
    attacks = [attack for attack in ATTACKS if not arguments.attack or attack.__name__ in arguments.attack]
    with server, file_limit(hard):
        outcomes = run(server, attacks, Limits(arguments.seconds, arguments.connections))
    columns = ("attack", "seconds", "RSS growth, MiB", "slowest normal, s", "normal lost", "wrongly served", "note")
    table = Table(*columns)
    for it in outcomes:
        lost = f"{it.num_lost} of {it.num_normal}"
        numbers = (f"{it.seconds:.1f}", f"{it.rss_growth_mib:.0f}", f"{it.max_latency_s:.2f}", lost, str(it.num_wrong))
        table.add_row(it.attack, *numbers, it.note)
    console.print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(it) for it in outcomes], file, indent=1)
    failed = [it.attack for it in outcomes if it.num_wrong or it.num_lost or it.num_left_open or it.rss_growth_mib > 64]
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
