"""Answers the requests of one batch."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from graftlm.server.batches.input_lines import BatchLine
from graftlm.server.batches.local_calls import LocalCalls
from graftlm.server.batches.result_files import ResultFiles
from graftlm.server.batches.running_limit import RunningLimit

__all__ = ["BatchJob"]

logger = logging.getLogger(__name__)

#: HTTP statuses after which a request is sent again: the queue is full (429), or a process is not running (503).
_RETRIED: Final = frozenset({429, 503})
_RETRY_S: Final = 0.5


class BatchJob:
    """Sends the requests that have no result yet. The number of concurrent requests is limited."""

    def __init__(
        self,
        calls: LocalCalls,
        lines: Iterator[BatchLine],
        results: ResultFiles,
        *,
        limit: RunningLimit,
        priority: int,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        """Initialize the job.

        Args:
            limit: the limit on concurrent requests.
            priority: the highest priority that a request may have.
            on_result: called after each result.
        """
        self._calls = calls
        self._lines = lines
        self._results = results
        self._limit = limit
        self._priority = priority
        self._on_result = on_result

    async def run(self) -> None:
        """Answer every request. A cancellation aborts the running requests, which then have no result.

        Raises:
            ExceptionGroup: contains an OSError; a result cannot be written.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(self._limit.alone):
                group.create_task(self._work())

    async def _work(self) -> None:
        for line in self._lines:
            if not self._results.has(line.custom_id):
                async with self._limit.slot():
                    await self._answer(line)
                self._on_result()

    async def _answer(self, line: BatchLine) -> None:
        given = line.body.get("priority")
        low = min(given, self._priority) if isinstance(given, int) else self._priority
        body = line.body | {"priority": low}
        while True:
            request_id = uuid.uuid4().hex
            try:
                answer = await self._calls.post(line.url, body, request_id)
            except Exception:  # an error of one request fails only this request
                logger.exception("a request of a batch failed")
                error = {"code": "server_error", "message": "the server failed to handle the request"}
                self._results.add(line.custom_id, _result(request_id, None, error), is_error=True)
                return
            if answer.status not in _RETRIED:
                break
            await asyncio.sleep(_RETRY_S)
        response = {"status_code": answer.status, "request_id": request_id, "body": answer.body}
        self._results.add(line.custom_id, _result(request_id, response, None), is_error=answer.status != 200)


def _result(request_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{request_id}", "response": response, "error": error}
