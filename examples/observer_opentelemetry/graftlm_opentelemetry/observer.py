"""The observer, which exports one span per request, and metrics of requests and steps."""

from collections.abc import Callable
from time import time_ns

from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Status, StatusCode, TracerProvider

from graftlm import hookimpl
from graftlm.records import RequestRecord, StepRecord
from graftlm.types import FinishReason

__all__ = ["OpenTelemetryObserver"]

_SCOPE = "graftlm"


class OpenTelemetryObserver:
    """An observer for OpenTelemetry. It exports a request's span when the request has ended, and stores nothing before.

    Args:
        tracers, meters: OpenTelemetry providers that receive the spans and the metrics.
        clock_ns: returns the time in nanoseconds since the epoch.
    """

    def __init__(self, tracers: TracerProvider, meters: MeterProvider, clock_ns: Callable[[], int] = time_ns) -> None:
        self._clock_ns = clock_ns
        self._tracer = tracers.get_tracer(_SCOPE)
        meter = meters.get_meter(_SCOPE)
        self._tokens = meter.create_histogram("gen_ai.client.token.usage", unit="{token}")
        self._duration = meter.create_histogram("gen_ai.server.request.duration", unit="s")
        self._first_token = meter.create_histogram("gen_ai.server.time_to_first_token", unit="s")
        self._step = meter.create_histogram("graftlm.step.duration", unit="s")
        self._running = meter.create_gauge("graftlm.running_requests", unit="{request}")
        self._waiting = meter.create_gauge("graftlm.waiting_requests", unit="{request}")
        self._free = meter.create_gauge("graftlm.free_pages", unit="{page}")

    @hookimpl
    def request_finished(self, record: RequestRecord) -> None:
        """Export the request's span and its metrics."""
        self._trace(record)
        usage, timings = record.usage, record.timings
        self._tokens.record(usage.prompt_tokens, {"gen_ai.token.type": "input"})
        self._tokens.record(usage.completion_tokens, {"gen_ai.token.type": "output"})
        reason = {"gen_ai.response.finish_reasons": record.finish_reason.value}
        if timings.total_s is not None:
            self._duration.record(timings.total_s, reason)
        if timings.first_token_s is not None:
            self._first_token.record(timings.first_token_s)

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        """Export the step's metrics."""
        self._step.record(record.host_s, {"graftlm.part": "host"})
        self._step.record(record.model_s, {"graftlm.part": "model"})
        self._running.set(record.num_running)
        self._waiting.set(record.num_waiting)
        self._free.set(record.free_pages)

    def _trace(self, record: RequestRecord) -> None:
        usage, timings = record.usage, record.timings
        end_ns = self._clock_ns()
        begin_ns = end_ns - _nanoseconds(timings.total_s or 0.0)
        span = self._tracer.start_span(
            "request",
            start_time=begin_ns,
            attributes={
                "gen_ai.response.id": record.request_id,
                "gen_ai.response.finish_reasons": (record.finish_reason.value,),
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "graftlm.cached_tokens": usage.cached_tokens,
                "graftlm.retractions": record.num_retractions,
            },
        )
        for name, after_s in (("admitted", timings.queue_s), ("first_token", timings.first_token_s)):
            if after_s is not None:
                span.add_event(name, timestamp=begin_ns + _nanoseconds(after_s))
        if record.finish_reason is FinishReason.ERROR:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
