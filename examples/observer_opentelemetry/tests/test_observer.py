"""Tests the observer in an engine, and the spans and metrics that it exports."""

import pytest
from graftlm_opentelemetry import OpenTelemetryObserver
from graftlm_opentelemetry.exporters import meter_provider, tracer_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from graftlm import Engine, SamplingParams
from graftlm.records import RequestRecord
from graftlm.types import FinishReason, Timings, Usage

SECOND_NS = 1_000_000_000
DONE = RequestRecord("a", FinishReason.STOP, Usage(1, 1), Timings(0.0, 0.0, 0.0), 0)


class Exported:
    """An observer, and the spans and metrics that it has exported."""

    def __init__(self):
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._reader = InMemoryMetricReader()
        self.observer = OpenTelemetryObserver(tracers, MeterProvider([self._reader]), lambda: 100 * SECOND_NS)

    @property
    def spans(self):
        return self._spans.get_finished_spans()

    def points(self):
        """Return metric name -> data points of the metric."""
        (resource,) = self._reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        return {metric.name: list(metric.data.data_points) for metric in scope.metrics}


def test_an_engine_exports_spans_and_metrics():
    exported = Exported()
    with Engine(model="demo", memory={"kv_tokens": 512}, plugins=[exported.observer]) as engine:
        outputs = engine.generate(["Hello", "Hello there"], SamplingParams(temperature=0, max_tokens=4))
    spans = {span.attributes["gen_ai.response.id"]: span for span in exported.spans}
    for output in outputs:
        attributes = spans[output.request_id].attributes
        assert attributes["gen_ai.usage.output_tokens"] == output.usage.completion_tokens
        assert attributes["gen_ai.response.finish_reasons"] == (output.finish_reason.value,)
    points = exported.points()
    used = {point.attributes["gen_ai.token.type"]: point.sum for point in points["gen_ai.client.token.usage"]}
    assert used == {
        "input": sum(output.usage.prompt_tokens for output in outputs),
        "output": sum(output.usage.completion_tokens for output in outputs),
    }
    assert {point.attributes["graftlm.part"] for point in points["graftlm.step.duration"]} == {"host", "model"}
    assert points["graftlm.running_requests"][-1].value == 0


def test_a_span_lies_where_the_request_was():
    exported = Exported()
    timings = Timings(queue_s=0.5, first_token_s=1.0, total_s=3.0)
    exported.observer.request_finished(RequestRecord("a", FinishReason.LENGTH, Usage(3, 4), timings, 1))
    (span,) = exported.spans
    assert (span.start_time, span.end_time) == (97 * SECOND_NS, 100 * SECOND_NS)
    events = {event.name: event.timestamp for event in span.events}
    assert events == {"admitted": 97 * SECOND_NS + SECOND_NS // 2, "first_token": 98 * SECOND_NS}
    assert span.status.status_code is StatusCode.UNSET


def test_a_request_that_failed_before_it_began_is_an_error_without_events():
    exported = Exported()
    exported.observer.request_finished(RequestRecord("a", FinishReason.ERROR, Usage(), Timings(), 0))
    (span,) = exported.spans
    assert span.status.status_code is StatusCode.ERROR
    assert not span.events
    assert "gen_ai.server.time_to_first_token" not in exported.points()


@pytest.mark.parametrize("make", [tracer_provider, meter_provider])
def test_an_unknown_exporter_is_named(make):
    with pytest.raises(ValueError, match="got 'pigeon', expected otlp, console or none"):
        make({"OTEL_TRACES_EXPORTER": "pigeon", "OTEL_METRICS_EXPORTER": "pigeon"})


@pytest.mark.parametrize("environment", [{}, {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}])
def test_by_default_nothing_is_recorded_or_exported(environment):
    tracers, meters = tracer_provider(environment), meter_provider(environment)
    # Only the SDK's providers send spans and metrics to exporters.
    assert not isinstance(tracers, TracerProvider)
    assert not isinstance(meters, MeterProvider)
    assert not tracers.get_tracer("test").start_span("test").is_recording()
    OpenTelemetryObserver(tracers, meters).request_finished(DONE)


def test_the_environment_names_the_exporter():
    tracers = tracer_provider({"OTEL_TRACES_EXPORTER": "console"})
    meters = meter_provider({"OTEL_METRICS_EXPORTER": "console"})
    assert isinstance(tracers, TracerProvider)
    assert isinstance(meters, MeterProvider)
    assert tracers.get_tracer("test").start_span("test").is_recording()
    tracers.shutdown()
    meters.shutdown()
