"""The table of connections: which connection is closed to admit another, and when a connection has timed out."""

import importlib.util
import sys

import pytest

from graftlm.server.connections import ConnectionLimits, ConnectionTable, Phase
from graftlm.server.file_limit import connections_under, num_open_files, raise_file_limit


class FakeConnection:
    def __init__(self, name, table):
        self.name, self.table = name, table
        self.body_bytes, self.is_read_paused, self.unsent_bytes = 0, False, 2**20
        self.ended = None

    def expire(self, phase):
        self.ended = phase
        self.table.forget(self)

    def abort(self):
        self.ended = "aborted"


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return ConnectionTable(ConnectionLimits(3, header_timeout_s=10.0, stall_timeout_s=30.0), clock)


@pytest.fixture
def connect(table):
    def make(name, phase=Phase.HEAD):
        connection = FakeConnection(name, table)
        connection.admitted = table.admit(connection)
        table.move(connection, phase)
        return connection

    return make


@pytest.mark.parametrize(
    ("phases", "evicted"),
    [
        ([Phase.HEAD, Phase.HEAD, Phase.HEAD], 0),
        ([Phase.ANSWER, Phase.HEAD, Phase.HEAD], 1),
        ([Phase.ANSWER, Phase.IDLE, Phase.HEAD], 1),
        ([Phase.ANSWER, Phase.HEAD, Phase.IDLE], 1),
        ([Phase.BODY, Phase.STALLED, Phase.IDLE], 2),
        ([Phase.STALLED, Phase.ANSWER, Phase.BODY], 2),
        ([Phase.ANSWER, Phase.STALLED, Phase.ANSWER], 1),
        ([Phase.ANSWER, Phase.ANSWER, Phase.ANSWER], None),
    ],
)
def test_a_new_connection_replaces_the_oldest_one_without_a_request(clock, table, connect, phases, evicted):
    old = []
    for number, phase in enumerate(phases):
        old.append(connect(str(number), phase))
        clock.now_s += 1
    new = connect("new")
    assert new.admitted == (evicted is not None)
    assert [it.ended for it in old] == ["aborted" if number == evicted else None for number in range(3)]
    assert len(table) == 3


@pytest.mark.parametrize(
    ("phase", "timeout_s"),
    [(Phase.HEAD, 10), (Phase.BODY, 30), (Phase.STALLED, 30), (Phase.CLOSING, 30), (Phase.ANSWER, None)],
)
def test_a_connection_is_closed_when_its_time_in_a_phase_is_over(clock, table, connect, phase, timeout_s):
    connection = connect("a", phase)
    for _ in range(1000):
        before_s = clock.now_s
        clock.now_s += 1
        table.move(connection, phase)  # as bytes that arrive one by one do
        table.sweep()
        if connection.ended:
            break
    assert connection.ended is (None if timeout_s is None else phase)
    assert timeout_s is None or before_s + 1 == 100 + timeout_s


def test_a_body_gets_one_more_second_per_kib_and_the_time_that_the_server_does_not_read(clock, table, connect):
    body = connect("a", Phase.BODY)
    body.body_bytes = 10 * 1024
    clock.now_s += 39
    table.sweep()
    assert body.ended is None
    body.is_read_paused = True
    clock.now_s += 1000
    table.sweep()
    body.is_read_paused = False
    clock.now_s += 39
    table.sweep()
    assert body.ended is None
    clock.now_s += 1
    table.sweep()
    assert body.ended is Phase.BODY


@pytest.mark.parametrize("phase", [Phase.STALLED, Phase.CLOSING])
def test_a_client_that_keeps_reading_is_kept_and_one_that_stops_is_closed(clock, table, connect, phase):
    slow, other = connect("slow", phase), connect("other", phase)
    for _ in range(10):
        clock.now_s += 29
        slow.unsent_bytes -= 1
        table.sweep()
        assert slow.ended is None
    assert other.ended is phase
    slow.unsent_bytes += 100  # further bytes of the answer are no progress of the client
    clock.now_s += 29
    table.sweep()
    assert slow.ended is None
    clock.now_s += 1
    table.sweep()
    assert slow.ended is phase


def test_unread_bytes_of_one_phase_do_not_count_in_the_next(clock, table, connect):
    connection = connect("a", Phase.STALLED)
    connection.unsent_bytes = 5000
    table.move(connection, Phase.CLOSING)
    clock.now_s += 30
    table.sweep()
    assert connection.ended is Phase.CLOSING


@pytest.mark.parametrize(
    ("file_limit", "num_open", "num_requests", "expected"),
    [
        (1024, 60, 1088, 1024 - 60 - 256),
        (20_000, 60, 1088, 4096),
        (20_000, 60, 5000, 10_000),
        (256, 60, 1088, 256 - 60 - 64),
        (64, 60, 1088, 16),
    ],
)
def test_the_connection_limit_leaves_file_descriptors_for_other_files(file_limit, num_open, num_requests, expected):
    assert connections_under(file_limit, num_open, num_requests) == expected


def test_the_soft_file_limit_is_raised_to_the_hard_limit():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, num_open_files() + 200), hard))
    try:
        limit = raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit == min(hard, 2**20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_constant_is_used_on_a_system_without_file_limits(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)  # the import fails, as on Windows
    spec = importlib.util.find_spec("graftlm.server.file_limit")
    limits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(limits)
    assert connections_under(limits.raise_file_limit(), limits.num_open_files(), 1088) == 4096
