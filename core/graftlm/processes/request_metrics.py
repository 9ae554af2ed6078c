"""What measures requests as clients experience them."""

from typing import Protocol

from graftlm.outputs import GatheredOutput

__all__ = ["RequestMetrics"]


class RequestMetrics(Protocol):
    """Hears of requests as clients experience them. Called in the event loop; must return at once."""

    def first_token(self, seconds: float) -> None:
        """Note the time from a request's arrival in the server to its first token."""
        ...

    def more_tokens(self, seconds: float, num_tokens: int) -> None:
        """Note tokens that came some time after the ones before."""
        ...

    def finished(self, output: GatheredOutput, seconds: float, outcome: str) -> None:
        """Note a prompt that ended.

        Args:
            seconds: since it arrived in the server.
            outcome: a finish reason, a `Failure`'s name instead of "error", or "rejected" or "unavailable".
        """
        ...
