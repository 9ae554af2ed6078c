"""The number and the contents of log lines about failed exports."""

import logging

import pytest
from opentelemetry import propagate

from graftlm.server.traces.export_log import ExportLog

EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
QUEUE = "opentelemetry.sdk._shared_internal"


def record(name, text, *args, level=logging.ERROR):
    return logging.LogRecord(name, level, __file__, 1, text, args, None)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log(clock):
    return ExportLog("http://c/v1/traces", clock)


def passed(log, *args, **kwargs):
    """Return the message that is logged; None if the record is dropped."""
    it = record(*args, **kwargs)
    return it.getMessage() if log.filter(it) else None


def test_one_record_per_minute_passes(log, clock):
    assert passed(log, EXPORTER, "code %s", 503) is not None
    for _ in range(3):
        assert passed(log, EXPORTER, "code %s", 503) is None
        assert passed(log, QUEUE, "Queue full, dropping %s.", "Span") is None
    clock.now_s += 59.9
    assert passed(log, EXPORTER, "code %s", 503) is None
    clock.now_s += 0.2
    assert passed(log, EXPORTER, "code %s", 503) is not None
    assert passed(log, EXPORTER, "code %s", 503) is None


def test_a_record_has_the_last_error_of_the_exporter_and_is_a_warning(log, clock):
    expected = "traces cannot be exported to http://c/v1/traces, and spans may be lost: code 401"
    first = record(EXPORTER, "code %s", 401)
    assert log.filter(first)
    assert (first.getMessage(), first.levelname) == (expected, "WARNING")
    clock.now_s += 61
    assert passed(log, QUEUE, "Queue full, dropping %s.", "Span") == expected


def test_a_full_queue_without_an_error_is_reported(log):
    assert passed(log, QUEUE, "Queue full, dropping %s.", "Span").endswith("Queue full, dropping Span.")


def test_only_the_loggers_of_exports_are_filtered(log, caplog):
    log.install()
    try:
        for name in (EXPORTER, EXPORTER, QUEUE, "opentelemetry.sdk.trace"):
            logging.getLogger(name).error("broken")
    finally:
        log.remove()
    assert [it.name for it in caplog.records] == [EXPORTER, "opentelemetry.sdk.trace"]
    logging.getLogger(EXPORTER).error("after the end")
    assert caplog.messages[-1] == "after the end"


def test_malformed_headers_of_clients_are_not_logged(log, caplog):
    propagator = propagate.get_global_textmap()
    headers = {
        "traceparent": f"00-{'1' * 32}-{'2' * 16}-01",
        "tracestate": "member without value",
        "baggage": "a=b;" * 300,
    }

    def num_warnings():
        caplog.clear()
        propagator.extract(headers)
        propagator.extract({"traceparent": "a" * 6000})
        return len(caplog.records)

    assert num_warnings()
    log.install()
    try:
        assert not num_warnings()
    finally:
        log.remove()
    assert num_warnings()
