"""The export of spans: sampling, OpenTelemetry's environment variables, failures of the server and of the collector."""

import os
import re
import secrets
import signal
import socket
import time
from contextlib import contextmanager

import httpx2
import pytest

from graftlm.config import EngineConfig
from graftlm.errors import ConfigError
from graftlm.server.traces import open_traces
from graftlm.testing.server_process import ServerProcess, wait_until
from graftlm.testing.trace_collector import TraceCollector

PATH = "/v1/completions"
SPAN = f"POST {PATH}"
PARENT_ID = "b7ad6b7169203331"
LONG = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
#: Limit for the end of a server, including 5 s for the last spans.
STOP_S = 15.0


@contextmanager
def serving(traces, environment=None, **server):
    config = {"model": "demo", "memory": {"kv_tokens": 8192}, "server": {"traces": traces} | server}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1"} | (environment or {})) as it:
        yield it


def complete(server, trace_id=None, **body):
    headers = {} if trace_id is None else {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    return httpx2.post(server.url + PATH, json={"prompt": "a", "max_tokens": 2} | body, headers=headers, timeout=60)


def stop_s(server):
    """Stop a server with SIGTERM, and return the seconds until its end."""
    start_s = time.monotonic()
    assert server.stop() == 0
    return time.monotonic() - start_s


@pytest.mark.full
def test_failed_prompts_are_marked_and_the_ratio_applies_to_requests_without_a_parent():
    settings = {"restart": True, "request_timeout_s": 2.0}
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    with TraceCollector() as collector:
        traces = {"endpoint": collector.url, "sample_ratio": 0, "service_name": "tests"}
        with serving(traces, environment, **settings) as server:
            for _ in range(5):
                assert complete(server).status_code == 200

            killed = secrets.token_hex(16)
            headers = {"traceparent": f"00-{killed}-{PARENT_ID}-01"}
            with httpx2.stream("POST", server.url + PATH, json=LONG, headers=headers, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                os.kill(server.children()["scheduler-0"], signal.SIGKILL)
                assert "error" in "".join(lines)
            (span,) = collector.wait_for(SPAN)
            assert (span.trace_id, span.status, span.attributes["error.type"]) == (killed, "ERROR", "unavailable")
            assert span.attributes["http.response.status_code"] == 200
            assert {it.name for it in collector.trace(killed)} == {SPAN, "queue", "prefill", "decode"}

            wait_until(lambda: httpx2.get(server.url + "/ready").status_code == 200, 60, "the restart")
            late = secrets.token_hex(16)
            assert complete(server, late, max_tokens=2000, ignore_eos=True).status_code == 408
            _, span = collector.wait_for(SPAN, 2)
            assert (span.trace_id, span.status, span.attributes["error.type"]) == (late, "ERROR", "timeout")
            assert span.seconds == pytest.approx(2.0, abs=1.5)
            assert {it.resource["service.name"] for it in collector.spans} == {"tests"}
            assert {it.trace_id for it in collector.spans} == {killed, late}


def test_environment_variables_of_opentelemetry_suffice_and_the_last_spans_are_exported_at_the_end():
    with TraceCollector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=from-the-environment",
            "OTEL_SERVICE_NAME": "assistant",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=tests",
            "OTEL_BSP_SCHEDULE_DELAY": "600000",
        }
        with serving({}, environment) as server:
            for _ in range(3):
                complete(server)
            assert collector.spans == []
            assert stop_s(server) < STOP_S
        spans = collector.named(SPAN)
        assert len(spans) == 3
        assert spans[0].resource["service.name"] == "assistant"
        assert spans[0].resource["deployment.environment"] == "tests"
        assert collector.headers["x-key"] == "from-the-environment"


@pytest.mark.full
def test_a_collector_that_refuses_connections_costs_one_log_line_per_minute():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        # A full queue: 64 spans, and two exports per second.
        environment = {
            "OTEL_BSP_SCHEDULE_DELAY": "500",
            "OTEL_BSP_MAX_QUEUE_SIZE": "64",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
        }
        with serving(url, environment) as server:
            for _ in range(60):
                assert complete(server).status_code == 200
            wait_until(lambda: "traces cannot be exported" in server.log)
            assert stop_s(server) < STOP_S
            lines = [line for line in server.log.splitlines() if "traces cannot be exported" in line]
            assert len(lines) == 1
            assert f"traces cannot be exported to {url}/v1/traces, and spans may be lost: Transient error" in lines[0]
            assert not re.search(r"Queue full|Traceback|Failed to export", server.log)
            assert f"{url}/v1/traces did not accept the last spans within 5 s; they are lost" in server.log


@pytest.mark.full
def test_a_collector_that_does_not_answer_delays_neither_requests_nor_the_end():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections in its backlog, and reads nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with serving(url, {"OTEL_BSP_SCHEDULE_DELAY": "100"}) as server:
            complete(server)
            silent.settimeout(30)
            connection, _ = silent.accept()  # the export has begun
            with connection:
                start_s = time.monotonic()
                for _ in range(5):
                    assert complete(server).status_code == 200
                assert time.monotonic() - start_s < 5
                assert stop_s(server) < STOP_S


INVALID_SIZE = "traces cannot be exported: max_queue_size must be a positive integer.* environment variables OTEL_"


def test_an_invalid_environment_variable_is_a_configuration_error(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    settings = EngineConfig.load({"server": {"traces": "http://127.0.0.1:1"}}).server.traces
    with pytest.raises(ConfigError, match=INVALID_SIZE):
        open_traces(settings, os.environ)


@pytest.mark.full
def test_a_server_with_an_invalid_environment_variable_does_not_start():
    config = {"model": "demo", "server": {"traces": "http://127.0.0.1:1"}}
    with pytest.raises(RuntimeError, match=INVALID_SIZE):
        ServerProcess(config, environment={"OTEL_BSP_MAX_QUEUE_SIZE": "0"})
