"""The spans that a server exports to a collector, with real traffic."""

import json
import secrets
import threading
import time
from itertools import pairwise

import httpx2
import pytest

from graftlm.testing.server_process import ServerProcess, wait_until
from graftlm.testing.trace_collector import TraceCollector

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
PARENT_ID = "b7ad6b7169203331"
#: Tolerance for times that were converted between seconds and nanoseconds.
ROUNDING_S = 1e-6


@pytest.fixture(scope="module")
def collector():
    with TraceCollector() as it:
        yield it


@pytest.fixture(scope="module")
def server(collector, tmp_path_factory):
    """Run a server that exports spans every 0.1 s and writes its log as JSON."""
    settings = {
        "traces": {"endpoint": collector.url, "headers": {"X-Key": "s3cret"}},
        "files": {"path": str(tmp_path_factory.mktemp("files"))},
        "log_format": "json",
        "log_level": "debug",
    }
    config = {"model": "demo", "memory": {"kv_tokens": 8192}, "server": settings}
    with ServerProcess(config, environment={"OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "100"}) as it:
        yield it


@pytest.fixture
def traced(server, collector):
    """Return a function that sends a sampled request, and returns (response, its spans by name)."""

    def send(path, num_spans=4, method="POST", **body):
        trace_id = secrets.token_hex(16)
        headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01", "tracestate": "vendor=value"}
        content = None
        if body:  # ASCII, because UTF-8 cannot encode half a surrogate pair
            headers["content-type"], content = "application/json", json.dumps(body).encode()
        response = httpx2.request(method, server.url + path, headers=headers, content=content, timeout=60)
        return response, spans_of(collector, trace_id, num_spans)

    return send


def spans_of(collector, trace_id, num_spans):
    """Wait for the spans of a trace, and return them."""
    wait_until(lambda: len(collector.trace(trace_id)) >= num_spans, 30, f"{num_spans} spans of trace {trace_id}")
    return collector.trace(trace_id)


def one(spans, name):
    """Return the only span with a name."""
    (found,) = [span for span in spans if span.name == name]
    return found


def children(spans, parent):
    return [span for span in spans if span.parent_id == parent.span_id]


def assert_consecutive(parent, phases):
    """Check that phases follow each other without gaps, within their parent."""
    ordered = sorted(phases, key=lambda span: (span.begin_ns, span.end_ns))
    assert parent.begin_ns <= ordered[0].begin_ns
    assert ordered[-1].end_ns <= parent.end_ns
    for before, after in pairwise(ordered):
        assert before.end_ns == after.begin_ns


def test_a_request_has_a_span_with_its_phases_below_the_callers_span(traced, collector):
    response, spans = traced(CHAT, messages=QUESTION, max_tokens=20, temperature=0, top_p=0.5, seed=7)
    answer = response.json()
    span = one(spans, f"POST {CHAT}")
    assert (span.parent_id, span.kind, span.status, span.trace_state) == (PARENT_ID, "SERVER", "UNSET", "vendor=value")
    assert {"gen_ai.latency." in name for name in span.attributes} == {True, False}
    assert {name: value for name, value in span.attributes.items() if "latency" not in name} == {
        "http.request.method": "POST",
        "url.path": CHAT,
        "url.scheme": "http",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "graftlm.request.id": response.headers["x-request-id"],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "graftlm",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    }
    assert span.resource["service.name"] == "graftlm"
    assert collector.headers["x-key"] == "s3cret"


def test_the_durations_of_the_phases_are_those_that_the_scheduler_measured(traced, server):
    response, spans = traced("/generate", text="What is a page?", sampling_params={"max_new_tokens": 16})
    meta = response.json()["meta_info"]
    span = one(spans, "POST /generate")
    phases = {phase.name: phase for phase in children(spans, span)}
    assert list(phases) == ["queue", "prefill", "decode"]
    assert_consecutive(span, phases.values())
    latency = {name.removeprefix("gen_ai.latency."): s for name, s in span.attributes.items() if "latency" in name}
    assert phases["queue"].seconds == pytest.approx(latency["time_in_queue"], abs=ROUNDING_S)
    assert phases["prefill"].seconds == pytest.approx(latency["time_in_model_prefill"], abs=ROUNDING_S)
    assert phases["decode"].seconds == pytest.approx(latency["time_in_model_decode"], abs=ROUNDING_S)
    assert latency["time_to_first_token"] == pytest.approx(
        latency["time_in_queue"] + latency["time_in_model_prefill"], abs=ROUNDING_S
    )
    assert latency["e2e"] == pytest.approx(sum(phase.seconds for phase in phases.values()), abs=3 * ROUNDING_S)
    # The answer contains the time from the end of the checks to the last output.
    assert latency["e2e"] <= meta["e2e_latency"] <= span.seconds


def test_a_stream_ends_its_span_after_the_last_event(server, collector):
    trace_id = secrets.token_hex(16)
    body = {"prompt": "a", "max_tokens": 8, "stream": True, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=60) as response:
        assert response.read().rstrip().endswith(b"[DONE]")
    spans = spans_of(collector, trace_id, 4)
    span = one(spans, "POST /v1/completions")
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] == 8
    assert span.attributes["gen_ai.operation.name"] == "text_completion"
    assert_consecutive(span, children(spans, span))


def test_completions_of_one_prompt_share_its_phases(traced):
    response, spans = traced("/v1/completions", prompt="a", n=3, max_tokens=4, ignore_eos=True)
    span = one(spans, "POST /v1/completions")
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 12 == response.json()["usage"]["completion_tokens"]
    assert [phase.name for phase in children(spans, span)] == ["queue", "prefill", "decode"]


def test_each_prompt_of_a_list_has_a_span(traced):
    response, spans = traced("/v1/completions", num_spans=9, prompt=["a", "b c d"], max_tokens=4, ignore_eos=True)
    span = one(spans, "POST /v1/completions")
    prompts = children(spans, span)
    assert [prompt.name for prompt in prompts] == ["prompt"] * 2
    for prompt in prompts:
        assert prompt.attributes["gen_ai.request.max_tokens"] == 4
        assert prompt.attributes["gen_ai.usage.output_tokens"] == 4
        phases = children(spans, prompt)
        assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
        assert_consecutive(prompt, phases)
    usage = response.json()["usage"]
    assert span.attributes["graftlm.prompts"] == 2
    assert span.attributes["gen_ai.usage.output_tokens"] == 8
    assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert sum(prompt.attributes["gen_ai.usage.input_tokens"] for prompt in prompts) == usage["prompt_tokens"]
    assert len({prompt.attributes["gen_ai.response.id"] for prompt in prompts}) == 2


def test_an_embedding_has_no_decode_phase_and_no_output_tokens(traced):
    response, spans = traced("/v1/embeddings", num_spans=3, input="a text")
    span = one(spans, "POST /v1/embeddings")
    assert [phase.name for phase in children(spans, span)] == ["queue", "prefill"]
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.attributes["gen_ai.usage.input_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert "gen_ai.usage.output_tokens" not in span.attributes
    assert "gen_ai.request.temperature" not in span.attributes


def test_the_number_of_spans_of_one_request_is_limited(traced):
    response, spans = traced("/v1/embeddings", num_spans=97, input=[f"text {i}" for i in range(40)])
    span = one(spans, "POST /v1/embeddings")
    assert len(children(spans, span)) == 32
    assert span.attributes["graftlm.prompts"] == 40
    assert span.attributes["gen_ai.usage.input_tokens"] == response.json()["usage"]["prompt_tokens"]


def test_cached_tokens_are_counted(traced):
    prompt = f"{secrets.token_hex(8)} " * 8
    traced("/v1/completions", prompt=prompt, max_tokens=1)
    response, spans = traced("/v1/completions", num_spans=4, prompt=prompt, max_tokens=1)
    cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 8
    assert one(spans, "POST /v1/completions").attributes["gen_ai.usage.cache_read.input_tokens"] == cached


@pytest.mark.parametrize(
    ("path", "operation", "body"),
    [
        ("/v1/messages", "chat", {"messages": QUESTION, "max_tokens": 4}),
        ("/v1/responses", "chat", {"input": "What is 2 + 3?", "max_output_tokens": 4}),
    ],
)
def test_other_chat_endpoints_are_traced(traced, path, operation, body):
    response, spans = traced(path, **body)
    span = one(spans, f"POST {path}")
    assert span.attributes["gen_ai.operation.name"] == operation
    assert span.attributes["gen_ai.response.id"] == response.json()["id"]
    assert [phase.name for phase in children(spans, span)] == ["queue", "prefill", "decode"]


def test_without_the_sampled_flag_nothing_is_exported(server, collector, traced):
    unsampled = secrets.token_hex(16)
    headers = {"traceparent": f"00-{unsampled}-{PARENT_ID}-00"}
    body = {"prompt": ["a", "b"], "max_tokens": 2}
    assert httpx2.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    traced("/v1/completions", **body)  # spans are exported in the order of their ends
    assert collector.trace(unsampled) == []


@pytest.mark.parametrize("traceparent", [None, "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_without_a_valid_parent_a_request_begins_a_trace(server, collector, traceparent):
    headers = {"x-request-id": secrets.token_hex(8)} | ({} if traceparent is None else {"traceparent": traceparent})
    httpx2.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers, timeout=60)

    def found():
        ids = [span.attributes.get("graftlm.request.id") for span in collector.spans]
        return headers["x-request-id"] in ids

    wait_until(found)
    (span,) = [it for it in collector.spans if it.attributes.get("graftlm.request.id") == headers["x-request-id"]]
    assert span.parent_id == ""


def test_probes_and_scrapes_have_no_spans(server, collector, traced):
    probes = ("/health", "/ready", "/ping", "/health_generate", "/metrics", "/dashboard/state")
    for path in probes:
        httpx2.get(server.url + path, timeout=60)
    _, spans = traced("/v1/models", num_spans=1, method="GET")
    assert one(spans, "GET /v1/models").attributes["http.response.status_code"] == 200
    assert not {span.attributes.get("url.path") for span in collector.spans} & set(probes)


def test_an_error_of_the_client_leaves_the_status_unset(traced):
    response, spans = traced("/v1/completions", num_spans=1, prompt="a", temperature=-1)
    assert response.status_code == 400
    (span,) = spans
    assert (span.status, span.attributes["http.response.status_code"]) == ("UNSET", 400)
    assert "error.type" not in span.attributes


def test_an_unknown_path_is_not_part_of_a_spans_name(traced):
    _, spans = traced("/unknown/" + "x" * 1000, num_spans=1, method="GET")
    (span,) = spans
    assert span.name == "GET"
    assert len(span.attributes["url.path"]) < 400


def disconnect(server, trace_id):
    """Read the first event of a long stream, then close the connection."""
    body = {"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, headers=headers, timeout=60) as response:
        next(response.iter_lines())


def test_a_disconnect_marks_the_span_as_aborted(server, collector):
    trace_id = secrets.token_hex(16)
    disconnect(server, trace_id)
    spans = spans_of(collector, trace_id, 4)
    span = one(spans, "POST /v1/completions")
    assert (span.status, span.attributes["error.type"]) == ("ERROR", "abort")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 2000
    assert [phase.name for phase in children(spans, span)] == ["queue", "prefill", "decode"]


def test_the_time_while_generation_is_paused_precedes_the_phases(server, collector):
    trace_id = secrets.token_hex(16)
    httpx2.post(server.url + "/pause_generation", json={}, timeout=60).raise_for_status()
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    body = {"text": "a", "sampling_params": {"max_new_tokens": 4}}
    sending = threading.Thread(
        target=httpx2.post, args=(server.url + "/generate",), kwargs={"json": body, "headers": headers, "timeout": 60}
    )
    sending.start()
    try:
        wait_until(lambda: httpx2.get(server.url + "/get_load").json()[0]["num_held_reqs"] == 1)
        held_ns = time.time_ns()
    finally:
        httpx2.post(server.url + "/continue_generation", json={}, timeout=60).raise_for_status()
        sending.join()
    spans = spans_of(collector, trace_id, 4)
    assert one(spans, "POST /generate").begin_ns < held_ns < one(spans, "queue").begin_ns


def test_each_request_of_a_batch_begins_a_trace(server, collector):
    line = {"method": "POST", "url": CHAT, "body": {"messages": QUESTION, "max_tokens": 4}}
    text = "".join(json.dumps(line | {"custom_id": f"q{i}"}) + "\n" for i in range(3))
    upload = {"files": {"file": ("lines.jsonl", text.encode())}, "data": {"purpose": "batch"}}
    file = httpx2.post(server.url + "/v1/files", timeout=60, **upload).json()
    before = {span.trace_id for span in collector.spans}
    trace_id = secrets.token_hex(16)
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    headers = {"traceparent": f"00-{trace_id}-{PARENT_ID}-01"}
    httpx2.post(server.url + "/v1/batches", json=body, headers=headers, timeout=60).raise_for_status()

    def lines():
        return [s for s in collector.named(f"POST {CHAT}") if s.trace_id not in before and s.kind == "INTERNAL"]

    wait_until(lambda: len(lines()) == 3, 60, "the spans of the batch")
    assert {span.parent_id for span in lines()} == {""}
    assert len({span.trace_id for span in lines()}) == 3
    for span in lines():
        names = [phase.name for phase in children(collector.trace(span.trace_id), span)]
        assert names == ["queue", "prefill", "decode"]
    assert [span.name for span in spans_of(collector, trace_id, 1)] == ["POST /v1/batches"]


def test_log_lines_in_json_have_the_trace_id(server, traced):
    response, spans = traced("/v1/models", num_spans=1, method="GET")
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    (line,) = [it for it in lines if it.get("request_id") == response.headers["x-request-id"]]
    assert line["trace_id"] == spans[0].trace_id


def test_header_values_are_not_shown(server):
    info = httpx2.get(server.url + "/server_info", timeout=60)
    assert info.json()["config"]["server"]["traces"]["endpoint"].startswith("http://127.0.0.1:")
    assert "X-Key" not in info.text
    assert "s3cret" not in info.text + server.log
