"""A graftlm plugin that reports requests and steps to OpenTelemetry; environment variables select the exporters."""

import os

from graftlm_opentelemetry.exporters import meter_provider, tracer_provider
from graftlm_opentelemetry.observer import OpenTelemetryObserver

__all__ = ["OpenTelemetryObserver", "observer"]

#: The plugin object that the entry point refers to. Each process of a server imports this module and has its own.
observer = OpenTelemetryObserver(tracer_provider(os.environ), meter_provider(os.environ))
