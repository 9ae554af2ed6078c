"""The log line with the load: its values, silence while idle, and a server that writes it."""

import json
import logging

import pytest
import requests

from graftlm.processes.messages import Load
from graftlm.processes.replicas import Replica
from graftlm.records import EngineStats
from graftlm.server.load_log import LoadLog
from graftlm.testing.server_process import ServerProcess, wait_until


class Clock:
    def __init__(self):
        self.now_s = 50.0

    def __call__(self):
        return self.now_s


def report(replica, prefill_tokens=0, **values):
    stats = EngineStats(
        **dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"tiers": None, "states": None, "drafts": {}} | values
    )
    replica.load = Load(process=replica.name, stats=stats, histograms={}, prefill_tokens=prefill_tokens)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def replicas():
    replicas = [Replica("scheduler-0"), Replica("scheduler-1")]
    for replica in replicas:
        report(replica, total_pages=100)
    return replicas


@pytest.fixture
def lines(replicas, clock, caplog):
    """Return a function that lets 10 s pass and returns the records written since then."""
    caplog.set_level(logging.INFO, "graftlm.server.load_log")
    log = LoadLog(replicas, clock, 10.0)

    def pass_interval():
        caplog.clear()
        clock.now_s += 10
        log.write()
        return caplog.records

    return pass_interval


def test_a_line_has_the_load_of_all_replicas_since_the_last_line(lines, replicas):
    report(
        replicas[0], 500, running_requests=2, total_pages=100, owned_pages=20, prompt_tokens=900, cached_tokens=450,
        generated_tokens=120, steps=9,
    )  # fmt: skip
    report(replicas[1], 12340, waiting_requests=3, total_pages=100, locked_pages=5, prompt_tokens=100, steps=9)
    (record,) = lines()
    assert record.getMessage() == (
        "2 running and 3 queued requests, prefill 1,284.0 tokens/s, decode 12.0 tokens/s, hit rate 45.0%, "
        "KV memory 12.5%"
    )
    assert (record.prefill_tokens_per_s, record.kv_usage, record.accept_len) == (1284.0, 0.125, None)
    report(replicas[0], 500, running_requests=1, total_pages=100, prompt_tokens=900, generated_tokens=150, steps=10)
    (record,) = lines()
    assert "prefill 0.0 tokens/s, decode 3.0 tokens/s, hit rate -," in record.getMessage()


def test_with_drafts_a_line_has_the_tokens_per_step_and_the_accepted_share(lines, replicas):
    report(replicas[0], generated_tokens=100, drafts={"radix": (80, 40), "suffix": (20, 20)}, steps=1)
    (record,) = lines()
    assert record.getMessage().endswith(", 2.50 tokens/step, 60.0% of drafts accepted")
    assert (record.accept_len, record.accept_rate) == (2.5, 0.6)


def test_an_idle_server_writes_no_line(lines, replicas):
    assert not lines()
    report(replicas[0], generated_tokens=5, steps=1)
    assert len(lines()) == 1
    assert not lines()


def test_requests_without_progress_are_reported(lines, replicas):
    report(replicas[0], running_requests=1)
    assert len(lines()) == 1
    assert "decode 0.0 tokens/s" in lines()[0].getMessage()


def test_a_replica_that_dies_or_restarts_lowers_no_rate(lines, replicas):
    report(replicas[0], generated_tokens=500, steps=50)
    lines()
    replicas[0].load = None
    assert not lines()
    report(replicas[0], generated_tokens=20, steps=2)
    assert lines()[0].decode_tokens_per_s == 2.0


def load_records(server):
    return [json.loads(line) for line in server.log.splitlines() if '"graftlm.server.load_log"' in line]


def complete(server):
    body = {"prompt": "One, two, three,", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert requests.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200


def test_a_server_writes_the_line(drafting_server):
    def work_done():
        """Send a request; return whether the lines have counted its tokens."""
        complete(drafting_server)
        records = load_records(drafting_server)
        return any(record["prefill_tokens_per_s"] > 0 < record["decode_tokens_per_s"] for record in records)

    wait_until(work_done, 30, "a line with tokens")


@pytest.mark.full
def test_a_server_without_an_interval_writes_no_line():
    config = {"memory": {"kv_tokens": 4096}, "server": {"log_interval_s": 0, "log_format": "json"}}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"}) as server:
        complete(server)
        with pytest.raises(TimeoutError):
            wait_until(lambda: bool(load_records(server)), 1.0, "no line")
