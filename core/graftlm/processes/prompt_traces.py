"""The interface of the traces of requests, and the trace of the HTTP request that is being handled."""

from contextvars import ContextVar
from typing import Protocol

from graftlm.outputs import GatheredOutput
from graftlm.processes.generation import PreparedRequest

__all__ = ["PromptTrace", "RequestTrace", "request_trace_var"]


class PromptTrace(Protocol):
    """Traces one prompt."""

    def end(self, output: GatheredOutput, outcome: str) -> None:
        """Record the end of the prompt. Called once, in the event loop.

        Args:
            outcome: as in `RequestMetrics.finished`.
        """
        ...

    def cancel(self) -> None:
        """Forget the prompt, because it could not be sent. Called instead of `end`."""
        ...


class RequestTrace(Protocol):
    """Traces one HTTP request."""

    def begin_prompt(self, request: PreparedRequest) -> PromptTrace:
        """Record that a prompt of the request will now be sent to a replica. Called in the event loop."""
        ...


#: The trace of the HTTP request that is being handled; None if it is not traced.
request_trace_var: ContextVar[RequestTrace | None] = ContextVar("graftlm_request_trace", default=None)
