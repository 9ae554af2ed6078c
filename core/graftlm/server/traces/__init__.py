"""Traces of HTTP requests, exported to an OpenTelemetry collector.

OpenTelemetry is imported only if the configuration or the environment enables traces.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from graftlm.config import TracesSettings, traces_plan
from graftlm.errors import ConfigError

if TYPE_CHECKING:
    from graftlm.server.traces.exporter import TraceExporter

__all__ = ["open_traces", "tracing_layers"]

logger = logging.getLogger(__name__)


def open_traces(settings: TracesSettings, environment: Mapping[str, str]) -> TraceExporter | None:
    """Start the export of traces, and return the exporter; None if traces are disabled.

    Args:
        environment: the environment variables of this process. OpenTelemetry reads some of them too.

    Raises:
        ConfigError: traces cannot be exported, or an environment variable of OpenTelemetry is invalid.
    """
    plan = traces_plan(settings, environment)
    if plan.error is not None:
        raise ConfigError(f"server.traces: {plan.error}")
    if plan.warning is not None:
        logger.warning("%s", plan.warning)
    if plan.endpoint is None:
        return None
    try:
        from graftlm.server.traces.exporter import TraceExporter

        exporter = TraceExporter(settings, plan.endpoint)
    except Exception as error:  # the classes of OpenTelemetry's errors vary
        raise ConfigError(
            f"traces cannot be exported: {error}. Correct server.traces and the environment variables OTEL_*, or set "
            "server.traces.enabled to false."
        ) from error
    logger.info("traces are exported to %s", exporter.endpoint)
    return exporter


def tracing_layers(
    exporter: TraceExporter | None,
    model: str,
    *,
    ignored_paths: frozenset[str] = frozenset(),
    is_local: bool = False,
) -> list[Middleware]:
    """Return the middleware that traces requests; none if `exporter` is None.

    Args:
        model: name of the served model.
        ignored_paths: paths whose requests are not traced.
        is_local: whether the requests are calls within this process, such as the requests of batches.
    """
    if exporter is None:
        return []
    from opentelemetry.trace import SpanKind

    from graftlm.server.traces.middleware import TraceRequests

    kind = SpanKind.INTERNAL if is_local else SpanKind.SERVER
    return [Middleware(TraceRequests, exporter=exporter, model=model, kind=kind, ignored_paths=ignored_paths)]
