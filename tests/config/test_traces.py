"""When traces are exported, where to, and which settings are refused."""

import subprocess
import sys

import pytest

from graftlm.config import EngineConfig, TracesPlan, TracesSettings, explain, traces_plan
from graftlm.errors import ConfigError

COLLECTOR = "http://collector:4318"
EXPORTED = COLLECTOR + "/v1/traces"
LOCAL = "http://localhost:4318/v1/traces"


@pytest.mark.parametrize(
    ("settings", "environment", "endpoint"),
    [
        ({}, {}, None),
        ({"endpoint": COLLECTOR}, {}, EXPORTED),
        ({"endpoint": COLLECTOR + "/"}, {}, EXPORTED),
        ({"endpoint": EXPORTED}, {}, EXPORTED),
        ({"endpoint": "https://host/otlp"}, {}, "https://host/otlp/v1/traces"),
        ({"enabled": True}, {}, LOCAL),
        ({"enabled": False, "endpoint": COLLECTOR}, {}, None),
        ({"endpoint": COLLECTOR}, {"OTEL_SDK_DISABLED": "True"}, None),
        ({"endpoint": COLLECTOR}, {"OTEL_TRACES_EXPORTER": "none"}, EXPORTED),
        ({"endpoint": COLLECTOR}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other"}, EXPORTED),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, EXPORTED),
        ({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/as-it-is"}, "http://c/as-it-is"),
        ({}, {"OTEL_TRACES_EXPORTER": "console, OTLP"}, LOCAL),
        ({}, {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, None),
        ({"enabled": False}, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, None),
        ({"enabled": True}, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, EXPORTED),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, EXPORTED),
        ({"endpoint": COLLECTOR}, {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, EXPORTED),
    ],
)
def test_configuration_and_environment_decide_where_traces_are_exported_to(settings, environment, endpoint):
    plan = traces_plan(TracesSettings(**settings), environment, lambda name: True)
    assert plan == TracesPlan(endpoint=endpoint)


def test_a_missing_package_is_an_error_if_the_configuration_enables_traces():
    plan = traces_plan(TracesSettings(endpoint=COLLECTOR), {}, lambda name: False)
    assert plan == TracesPlan(error="OpenTelemetry is not installed; run: pip install 'graftlm[otlp]'")


def test_a_missing_package_is_a_warning_if_only_the_environment_enables_traces():
    plan = traces_plan(TracesSettings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": COLLECTOR}, lambda name: False)
    assert (plan.endpoint, plan.error) == (None, None)
    assert plan.warning.startswith("traces are not exported, although the environment enables them: OpenTelemetry is")


def test_an_unsupported_protocol_is_named():
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    plan = traces_plan(TracesSettings(enabled=True), environment, lambda name: True)
    assert plan.error.startswith("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc', but only 'http/protobuf' is supported")


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ("collector:4318", "server.traces.endpoint: expected a URL such as http://localhost:4318"),
        ("grpc://collector", "server.traces.endpoint: expected a URL"),
        ("http://", "server.traces.endpoint: expected a URL"),
        ("http://host:port", "server.traces.endpoint: expected a URL"),
        ("http://host/a b", "server.traces.endpoint: expected a URL"),
        ("http://host?token=1", "server.traces.endpoint: must not contain a query or a fragment"),
        ({"sample_ratio": 1.5}, "server.traces.sample_ratio: must be at most 1.0, got 1.5"),
        ({"sample_ratio": True}, "server.traces.sample_ratio: must be a number, got True"),
        ({"service_name": ""}, "server.traces.service_name: must not be empty"),
        ({"headers": {"a b": "c"}}, "server.traces.headers.a b: must be the name of an HTTP header field"),
        ({"sample_rate": 1}, "server.traces.sample_rate: unknown key; did you mean 'sample_ratio'?"),
    ],
)
def test_wrong_settings_are_refused(traces, message):
    with pytest.raises(ConfigError) as refused:
        EngineConfig.load({"server": {"traces": traces}})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "traces",
    [
        "http://user:s3cret@collector",
        "http://s3cret@collector:4318/path",
        {"headers": {"x-key": "s3cret\n"}},
        {"headers": {"x-key": "s3crét"}},
        {"headers": {"x key": "s3cret"}},
        {"headers": ["x-key: s3cret"]},
        {"headers": "x-key=s3cret"},
    ],
)
def test_errors_do_not_show_secrets(traces):
    with pytest.raises(ConfigError, match=r"server\.traces\.(endpoint|headers)") as refused:
        EngineConfig.load({"server": {"traces": traces}})
    assert "s3cr" not in str(refused.value)


def test_the_values_of_headers_are_not_shown():
    config = EngineConfig.load({"server": {"traces": {"headers": {"x-key": "s3cret"}}}})
    (setting,) = [setting for setting in explain(config) if setting.path == "server.traces.headers.x-key"]
    assert setting.value == "**********"
    assert config.server.traces.headers["x-key"].get_secret_value() == "s3cret"


def test_config_check_names_the_extra_if_opentelemetry_is_not_installed(tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text(f"server:\n  traces:\n    endpoint: {COLLECTOR}\n")
    code = """
import sys
sys.modules["opentelemetry.exporter"] = None  # importing it raises ModuleNotFoundError, as if it were not installed
from graftlm.cli import main
main()
"""
    check = [sys.executable, "-c", code, "config", "check", str(file)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 2
    problem = "server.traces.endpoint: OpenTelemetry is not installed; run: pip install 'graftlm[otlp]'"
    assert f"engine.yaml:3: {problem}" in done.stderr
    done = subprocess.run([*check, "--elsewhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "OK\n")
