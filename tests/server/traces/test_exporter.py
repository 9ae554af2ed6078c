"""The sampler and the resource of an exporter, from the configuration and the environment."""

import subprocess
import sys

import pytest

from graftlm.config import TracesSettings
from graftlm.server.traces import open_traces
from graftlm.server.traces.exporter import TraceExporter

NOWHERE = "http://127.0.0.1:1/v1/traces"


@pytest.fixture
async def make(monkeypatch):
    """Return a function that makes an exporter in an environment."""
    made = []

    def exporter(environment, **settings):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        made.append(TraceExporter(TracesSettings(**settings), NOWHERE))
        return made[-1]

    yield exporter
    for it in made:
        await it.close(10)


@pytest.mark.parametrize(
    ("ratio", "environment", "sampler"),
    [
        (None, {}, "ParentBased{root:AlwaysOnSampler"),
        (None, {"OTEL_TRACES_SAMPLER": "always_off"}, "AlwaysOffSampler"),
        (
            None,
            {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"},
            "ParentBased{root:TraceIdRatioBased{0.25}",
        ),
        (0.5, {"OTEL_TRACES_SAMPLER": "always_off"}, "ParentBased{root:TraceIdRatioBased{0.5}"),
    ],
)
async def test_the_ratio_of_the_configuration_replaces_the_sampler_of_the_environment(
    make, ratio, environment, sampler
):
    assert make(environment, sample_ratio=ratio).tracer.sampler.get_description().startswith(sampler)


@pytest.mark.parametrize(
    ("name", "environment", "expected"),
    [
        (None, {}, "graftlm"),
        (None, {"OTEL_SERVICE_NAME": "of-the-environment"}, "of-the-environment"),
        (None, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=attribute"}, "attribute"),
        ("configured", {"OTEL_SERVICE_NAME": "of-the-environment"}, "configured"),
    ],
)
async def test_the_service_has_the_configured_name_or_that_of_the_environment(make, name, environment, expected):
    span = make(environment, service_name=name).tracer.start_span("a")
    assert span.resource.attributes["service.name"] == expected
    assert "service.version" in span.resource.attributes


async def test_a_parent_without_the_sampled_flag_is_respected(make):
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}
    exporter = make({})
    span = exporter.tracer.start_span("a", exporter.propagator.extract(parent))
    assert not span.is_recording()
    assert f"{span.get_span_context().trace_id:032x}" == "a" * 32


def test_without_traces_nothing_is_opened():
    assert open_traces(TracesSettings(), {}) is None
    assert open_traces(TracesSettings(endpoint="http://collector"), {"OTEL_SDK_DISABLED": "true"}) is None


def test_an_environment_that_cannot_be_used_is_logged(caplog):
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert open_traces(TracesSettings(), environment) is None
    (message,) = caplog.messages
    assert message.startswith("traces are not exported, although the environment enables them: OTEL_EXPORTER_OTLP_PROT")


def test_fastapi_creates_no_spans_beside_those_of_the_server():
    code = """
import asyncio
from fastapi import APIRouter
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from graftlm.config import TracesSettings
from graftlm.server.app import create_local_app
from graftlm.server.batches.local_calls import LocalCalls
from graftlm.server.traces import tracing_layers
from graftlm.server.traces.exporter import TraceExporter

spans, provider, router = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False), APIRouter()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)  # as a plugin may do
router.add_api_route("/x", lambda: 1, methods=["POST"])
traces = TraceExporter(TracesSettings(sample_ratio=0), "http://127.0.0.1:1/v1/traces")
app = create_local_app(router, tracing_layers(traces, "demo", is_local=True))
answer = asyncio.run(LocalCalls(app).post("/x", {}, "id"))
print(answer.status, len(spans.get_finished_spans()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "200 0\n", done.stderr
