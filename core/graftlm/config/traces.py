"""Whether a server exports traces, from its configuration and OpenTelemetry's environment variables."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from graftlm.config.server_sections import TracesSettings

__all__ = ["TracesPlan", "traces_plan"]

#: The modules of the extra `graftlm[otlp]`.
_MODULES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_DEFAULT_ENDPOINT: Final = "http://localhost:4318"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SUPPORTED_PROTOCOL: Final = "http/protobuf"
_PATH: Final = "/v1/traces"


@dataclass(frozen=True, slots=True)
class TracesPlan:
    """What a server does about traces.

    Attributes:
        endpoint: URL to which traces are exported; None if traces are disabled, or if there is an error or a warning.
        error: why traces that the configuration enables cannot be exported; None if they can.
        warning: the same for traces that only the environment enables.
    """

    endpoint: str | None = None
    error: str | None = None
    warning: str | None = None


def traces_plan(
    settings: TracesSettings,
    environment: Mapping[str, str],
    has_module: Callable[[str], bool] | None = None,
) -> TracesPlan:
    """Return what a server does about traces.

    Args:
        environment: the environment variables.
        has_module: whether a module is installed; None: look it up.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or settings.enabled is False:
        return TracesPlan()
    configured = settings.enabled is True or settings.endpoint is not None
    if not configured and not _enabled_by(environment):
        return TracesPlan()
    problem = _problem(settings, environment, has_module or _is_installed)
    if problem is None:
        return TracesPlan(endpoint=_traces_url(settings, environment))
    if configured:
        return TracesPlan(error=problem)
    return TracesPlan(warning=f"traces are not exported, although the environment enables them: {problem}")


def _enabled_by(environment: Mapping[str, str]) -> bool:
    exporters = environment.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporters:
        return "otlp" in [name.strip().lower() for name in exporters.split(",")]
    return any(environment.get(name) for name in (_TRACES_ENDPOINT, _ENDPOINT))


def _problem(settings: TracesSettings, environment: Mapping[str, str], has_module: Callable[[str], bool]) -> str | None:
    if not all(has_module(name) for name in _MODULES):
        return "OpenTelemetry is not installed; run: pip install 'graftlm[otlp]'"
    if settings.endpoint is None:  # an endpoint of the configuration is always one for HTTP
        name = next((name for name in _PROTOCOLS if environment.get(name)), None)
        if name is not None and environment[name].strip().lower() != _SUPPORTED_PROTOCOL:
            return (
                f"{name} is {environment[name]!r}, but only {_SUPPORTED_PROTOCOL!r} is supported; set "
                "server.traces.endpoint to the collector's HTTP port, usually 4318"
            )
    return None


def _traces_url(settings: TracesSettings, environment: Mapping[str, str]) -> str:
    if settings.endpoint is None and environment.get(_TRACES_ENDPOINT):
        return environment[_TRACES_ENDPOINT]
    base = (settings.endpoint or environment.get(_ENDPOINT) or _DEFAULT_ENDPOINT).rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # a parent package is missing
        return False
