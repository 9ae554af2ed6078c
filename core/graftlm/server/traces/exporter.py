"""The queue of ended spans, and their export in batches to a collector."""

import asyncio
import contextlib
import logging
import threading
from typing import Final

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

import graftlm
from graftlm.config import TracesSettings
from graftlm.server.traces.export_log import ExportLog

__all__ = ["TraceExporter"]

logger = logging.getLogger(__name__)

#: Value of `service.name` if neither the configuration nor the environment contains one.
_SERVICE_NAME: Final = "graftlm"


class TraceExporter:
    """Creates spans and exports them.

    Ended spans are stored in a queue of limited length, from which a thread exports them in batches. If the queue is
    full, the oldest spans are dropped. OpenTelemetry's variables `OTEL_BSP_*` change the limits.

    Attributes:
        tracer: creates spans.
        propagator: reads the trace context from header fields.
        endpoint: URL to which spans are sent.
    """

    def __init__(self, settings: TracesSettings, endpoint: str) -> None:
        """Start the thread that exports spans to `endpoint`, a complete URL."""
        headers = {name: value.get_secret_value() for name, value in settings.headers.items()}
        self.endpoint = endpoint
        exporter = OTLPSpanExporter(endpoint=endpoint, headers=headers or None)
        # At exit, the provider would wait 30 s for a collector that does not answer.
        self._provider = TracerProvider(
            sampler=_sampler(settings.sample_ratio), resource=_resource(settings.service_name), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("graftlm", graftlm.__version__)
        self.propagator = propagate.get_global_textmap()
        self._log = ExportLog(endpoint)
        self._log.install()

    async def close(self, timeout_s: float) -> None:
        """Export the spans in the queue, for at most `timeout_s`. Spans that end later are dropped."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(done.set)

        # Not a thread of the event loop's executor, because the end of the event loop waits for these threads.
        threading.Thread(target=shut_down, name="graftlm-traces-end", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%s did not accept the last spans within %.0f s; they are lost", self.endpoint, timeout_s)
        else:
            self._log.remove()


def _sampler(ratio: float | None) -> Sampler | None:
    """Return a sampler that respects the decision of the parent span; None: the sampler that the environment names."""
    return None if ratio is None else ParentBased(TraceIdRatioBased(ratio))


def _resource(service_name: str | None) -> Resource:
    found = Resource.create({SERVICE_VERSION: graftlm.__version__})
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    name = service_name or (None if is_named else _SERVICE_NAME)
    return found if name is None else found.merge(Resource({SERVICE_NAME: name}))
