"""The interface of the metrics of requests."""

from typing import Protocol

from graftlm.outputs import GatheredOutput

__all__ = ["RequestMetrics"]


class RequestMetrics(Protocol):
    """Measures the latencies and outcomes of requests. The methods are called in the event loop and must not block."""

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival in the server to its first token."""
        ...

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        """Record later tokens of a request.

        Args:
            seconds: time since the request's previous tokens.
            num_tokens: number of tokens that arrived together.
        """
        ...

    def finished(self, output: GatheredOutput, seconds: float, outcome: str) -> None:
        """Record the end of a prompt.

        Args:
            seconds: time since the prompt's arrival in the server.
            outcome: a finish reason other than "error", the name of a `Failure`, "rejected" or "unavailable".
        """
        ...
