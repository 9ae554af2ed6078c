"""The spans of one request, from the events of its answer and its prompts."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import PreparedRequest
from graftlm.request_options import RequestOptions
from graftlm.server.traces.request_spans import RequestSpans
from graftlm.server.traces.traced_prompt import Phase, TracedPrompt
from graftlm.types import Completion, FinishReason, SamplingParams, Timings, Usage

SECOND_NS = 10**9
TIMINGS = Timings(queue_s=0.25, first_token_s=0.5, total_s=1.0)


class Clock:
    """A clock that each call advances by one second."""

    now_s = 0

    def __call__(self):
        self.now_s += 1
        return self.now_s * SECOND_NS


def request(request_id="a", **options):
    return PreparedRequest(request_id, None, SamplingParams(max_tokens=4), 1, RequestOptions(**options))


def output(reason=FinishReason.STOP, timings=TIMINGS):
    return GatheredOutput((Completion(0, "text", (1, 2), reason),), Usage(3, 2, 1), timings)


class Rig:
    """A request's spans, and what was exported."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        tracer = provider.get_tracer("test")
        self.spans = RequestSpans(tracer.start_span("POST", start_time=0), tracer, "demo", Clock())

    @property
    def exported(self):
        return self._exporter.get_finished_spans()

    @property
    def names(self):
        return [span.name for span in self.exported]


@pytest.fixture
def rig():
    return Rig()


def test_spans_are_exported_when_the_answer_and_all_prompts_have_ended(rig):
    first, second = rig.spans.begin_prompt(request("a")), rig.spans.begin_prompt(request("b"))
    first.end(output(), "stop")
    rig.spans.end_answer("POST /x", {"http.response.status_code": 200}, None)
    assert rig.names == []
    second.end(output(), "stop")
    phases = ["queue", "prefill", "decode"]
    assert rig.names == [*phases, "prompt", *phases, "prompt", "POST /x"]
    server = rig.exported[-1]
    assert server.end_time == 4 * SECOND_NS  # the end of the answer, not of the last prompt
    assert server.attributes["gen_ai.usage.input_tokens"] == 6


def test_a_request_without_prompts_has_one_span(rig):
    rig.spans.end_answer("GET /x", {"http.response.status_code": 500}, "500")
    (span,) = rig.exported
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "500")
    assert not any(name.startswith("gen_ai") for name in span.attributes)


def test_a_prompt_that_begins_after_the_end_of_the_answer_has_a_span(rig):
    rig.spans.end_answer("POST /x", {}, None)
    assert rig.names == ["POST /x"]
    rig.spans.begin_prompt(request()).end(output(), "stop")
    assert rig.names == ["POST /x", "queue", "prefill", "decode", "prompt"]
    assert rig.exported[-1].parent.span_id == rig.exported[0].context.span_id


def test_a_prompt_that_could_not_be_sent_is_forgotten(rig):
    sent, unsent = rig.spans.begin_prompt(request("a")), rig.spans.begin_prompt(request("b"))
    unsent.cancel()
    sent.end(output(), "stop")
    rig.spans.end_answer("POST /x", {}, None)
    assert rig.names == ["queue", "prefill", "decode", "POST /x"]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (["stop", "length"], None),
        (["stop", "abort"], "abort"),
        (["abort", "engine"], "engine"),
        (["engine", "abort"], "engine"),
        (["request", "engine"], "request"),
    ],
)
def test_the_first_failure_other_than_an_abort_marks_the_request(rig, outcomes, expected):
    prompts = [rig.spans.begin_prompt(request(str(i))) for i in range(len(outcomes))]
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        prompt.end(output(), outcome)
    rig.spans.end_answer("POST /x", {}, None)
    server = rig.exported[-1]
    assert server.attributes.get("error.type") == expected
    assert (server.status.status_code is StatusCode.ERROR) == (expected is not None)


def test_an_adapter_is_the_model_of_its_requests(rig):
    rig.spans.begin_prompt(request(adapter="pirate")).end(output(), "stop")
    rig.spans.end_answer("POST /x", {}, None)
    assert rig.exported[-1].attributes["gen_ai.request.model"] == "pirate"


@pytest.mark.parametrize(
    ("timings", "expected"),
    [
        (Timings(), [Phase("queue", 10 * SECOND_NS, 20 * SECOND_NS)]),
        (Timings(None, None, 1.0), [Phase("queue", 10 * SECOND_NS, 11 * SECOND_NS)]),
        (
            Timings(1.0, None, None),
            [Phase("queue", 10 * SECOND_NS, 11 * SECOND_NS), Phase("prefill", 11 * SECOND_NS, 20 * SECOND_NS)],
        ),
        (
            Timings(1.0, 3.0, 7.0),
            [
                Phase("queue", 10 * SECOND_NS, 11 * SECOND_NS),
                Phase("prefill", 11 * SECOND_NS, 13 * SECOND_NS),
                Phase("decode", 13 * SECOND_NS, 17 * SECOND_NS),
            ],
        ),
    ],
)
def test_the_last_phase_that_a_prompt_reached_ends_with_the_prompt(timings, expected):
    prompt = TracedPrompt.of(request(), output(timings=timings), "abort", "demo", 10 * SECOND_NS, 20 * SECOND_NS)
    assert list(prompt.phases()) == expected


def test_latencies_that_were_not_reached_are_absent():
    prompt = TracedPrompt.of(request(), output(timings=Timings(0.5, None, 2.0)), "abort", "demo", 0, SECOND_NS)
    latencies = {name: value for name, value in prompt.attributes().items() if "latency" in name}
    assert latencies == {
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.e2e": 2.0,
        "gen_ai.latency.time_in_model_inference": 1.5,
    }
