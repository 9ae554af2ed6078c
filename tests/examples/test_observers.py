"""The observer packages under examples/ pass their own tests."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from graftlm import Engine, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGES = (EXAMPLES / "observer_csv", EXAMPLES / "observer_opentelemetry")


@pytest.fixture
def on_path(monkeypatch):
    for package in PACKAGES:
        monkeypatch.syspath_prepend(package)


def test_both_record_the_requests_of_an_engine(on_path, tmp_path):
    from graftlm_csv_recorder import CsvRecorder
    from graftlm_opentelemetry import OpenTelemetryObserver
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, metrics, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    observer = OpenTelemetryObserver(tracers, MeterProvider([metrics]), lambda: 10**11)
    params = SamplingParams(temperature=0, max_tokens=4)
    with (
        CsvRecorder(tmp_path) as recorder,
        Engine(model="demo", memory={"kv_tokens": 512}, plugins=[recorder, observer]) as engine,
    ):
        (output,) = engine.generate("Hello", params)
    (file,) = tmp_path.glob("requests-*.csv")
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert (row["request_id"], int(row["completion_tokens"])) == (output.request_id, output.usage.completion_tokens)
    assert len(list(tmp_path.glob("steps-*.csv"))) == 1
    (span,) = spans.get_finished_spans()
    assert span.attributes["gen_ai.response.id"] == output.request_id
    (scope,) = metrics.get_metrics_data().resource_metrics[0].scope_metrics
    assert {"gen_ai.client.token.usage", "graftlm.step.duration"} <= {metric.name for metric in scope.metrics}


def test_the_environment_names_the_exporters(on_path):
    from graftlm_opentelemetry.exporters import meter_provider, tracer_provider
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    providers = [
        (tracer_provider, "OTEL_TRACES_EXPORTER", TracerProvider),
        (meter_provider, "OTEL_METRICS_EXPORTER", MeterProvider),
    ]
    for make, variable, kind in providers:
        assert not isinstance(make({}), kind)  # the SDK's providers alone export
        exporting = make({variable: "console"})
        assert isinstance(exporting, kind)
        exporting.shutdown()
        with pytest.raises(ValueError, match="got 'pigeon', expected otlp, console or none"):
            make({variable: "pigeon"})


@pytest.mark.full
def test_the_packages_own_tests_pass():
    paths = os.pathsep.join([*map(str, PACKAGES), os.environ.get("PYTHONPATH", "")])
    settings = ["-c", str(PACKAGES[0] / "pyproject.toml"), "-o", "filterwarnings=error"]
    loops = ["-o", "asyncio_default_fixture_loop_scope=function"]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "--import-mode=importlib", *settings, *loops]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(package / "tests") for package in PACKAGES)],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
