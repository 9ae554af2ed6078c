"""A graftlm plugin: tells OpenTelemetry of requests and steps, by the exporters that the environment names."""

import os

from graftlm_opentelemetry.exporters import meter_provider, tracer_provider
from graftlm_opentelemetry.observer import OpenTelemetryObserver

__all__ = ["OpenTelemetryObserver", "observer"]

#: What the entry point names. Each process of a server imports it, and so has its own.
observer = OpenTelemetryObserver(tracer_provider(os.environ), meter_provider(os.environ))
