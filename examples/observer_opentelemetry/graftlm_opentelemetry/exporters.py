"""OpenTelemetry's tracer and meter providers, with the exporters that environment variables select."""

from collections.abc import Mapping

from opentelemetry.metrics import MeterProvider, NoOpMeterProvider
from opentelemetry.sdk import metrics, trace
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import NoOpTracerProvider, TracerProvider

__all__ = ["meter_provider", "tracer_provider"]


def tracer_provider(environment: Mapping[str, str]) -> TracerProvider:
    """Return a provider that exports spans with the exporter in `OTEL_TRACES_EXPORTER`.

    Raises:
        ValueError: the variable has an unknown value.
    """
    match environment.get("OTEL_TRACES_EXPORTER", "none"):
        case "none":
            return NoOpTracerProvider()
        case "console":
            exporter: SpanExporter = ConsoleSpanExporter()
        case "otlp":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        case other:
            raise ValueError(f"OTEL_TRACES_EXPORTER: got '{other}', expected otlp, console or none")
    provider = trace.TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def meter_provider(environment: Mapping[str, str]) -> MeterProvider:
    """Return a provider that exports metrics with the exporter in `OTEL_METRICS_EXPORTER`.

    Raises:
        ValueError: the variable has an unknown value.
    """
    match environment.get("OTEL_METRICS_EXPORTER", "none"):
        case "none":
            return NoOpMeterProvider()
        case "console":
            exporter: MetricExporter = ConsoleMetricExporter()
        case "otlp":
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            exporter = OTLPMetricExporter()
        case other:
            raise ValueError(f"OTEL_METRICS_EXPORTER: got '{other}', expected otlp, console or none")
    return metrics.MeterProvider([PeriodicExportingMetricReader(exporter)])
