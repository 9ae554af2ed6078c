"""The interface through which the times of requests are reported to the server's metrics."""

from typing import Protocol

from graftlm.outputs import GatheredOutput

__all__ = ["RequestMetrics"]


class RequestMetrics(Protocol):
    """Measures requests as clients experience them. Called in the event loop; the methods must not block."""

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
            outcome: a finish reason (instead of "error", the name of a `Failure`), "rejected" or "unavailable".
        """
        ...
