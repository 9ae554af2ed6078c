"""Tracks the requests whose grammar is being compiled."""

from collections.abc import Iterator

from graftlm.errors import RequestError
from graftlm.scheduling.request import Request

__all__ = ["CompilingGrammars"]


class CompilingGrammars:
    """Tracks queued requests until their grammar is compiled."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    @property
    def next_deadline_s(self) -> float | None:
        """Clock reading at which the first compilation times out; None if no grammar is being compiled."""
        deadlines = [r.grammar.deadline_s for r in self._requests.values() if r.grammar is not None]
        return min(deadlines, default=None)

    def add(self, request: Request) -> None:
        """Add a request; a request without a grammar is ignored."""
        if request.grammar is not None:
            self._requests[request.request_id] = request

    def start(self, now: float) -> Iterator[tuple[Request, RequestError | None]]:
        """Create the matchers of grammars that have been compiled.

        Effects: removes each request that now has a matcher. A request whose grammar failed stays until `leave`.

        Returns: each request that now has a matcher, with None, and each request whose grammar failed, with the error.
        """
        for request_id, request in list(self._requests.items()):
            try:
                if request.grammar is None or not request.grammar.start(now):
                    continue
            except RequestError as error:
                yield request, error
            else:
                del self._requests[request_id]
                yield request, None

    def leave(self, request: Request) -> None:
        """Remove a request that has finished, and release its reference to the compilation."""
        if self._requests.pop(request.request_id, None) is not None and request.grammar is not None:
            request.grammar.leave()
