"""Runs the batches of a server, one after another. Batches survive a restart."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from graftlm.config import BatchSettings
from graftlm.server.batches.folder import BatchFolder
from graftlm.server.batches.input_lines import check_input, read_lines
from graftlm.server.batches.job import BatchJob
from graftlm.server.batches.local_calls import LocalCalls
from graftlm.server.batches.records import (
    ACTIVE,
    BatchBody,
    BatchProblem,
    BatchProblems,
    BatchRecord,
    FileBody,
    RequestCounts,
    new_record_id,
)
from graftlm.server.batches.result_files import ResultFiles
from graftlm.server.batches.running_limit import RunningLimit

__all__ = ["BatchService"]

logger = logging.getLogger(__name__)

#: Final state of a batch -> the field with the time of its end.
_TIMES: Final = {
    "completed": "completed_at",
    "failed": "failed_at",
    "expired": "expired_at",
    "cancelled": "cancelled_at",
}


class BatchService:
    """Answers the batches in a folder. All methods are called in one event loop.

    A batch is `validating`, then `in_progress`, and ends as `completed`, `failed` (its input is wrong), `expired` or
    `cancelled`. Each result is appended immediately, so a server that is killed loses only running requests.

    Attributes:
        folder: the folder of files and batches.
    """

    def __init__(
        self,
        folder: BatchFolder,
        calls: LocalCalls,
        settings: BatchSettings,
        num_others: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initialize the service. `start` starts the work.

        Args:
            num_others: returns the number of running requests that do not belong to a batch.
            clock: returns Unix time in seconds.
        """
        self.folder = folder
        self._calls = calls
        self._settings = settings
        self._num_others = num_others
        self._clock = clock
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # id and task of the running batch; `cancel` cancels the task
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._results: ResultFiles | None = None
        self._total = 0

    # -- start and end of the server -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a task that runs the batches that have not ended."""
        self.folder.remove_incomplete()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Abort the running batch and unlock the folder. The next server with this folder continues the batch."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.folder.close()

    # -- for HTTP handlers ---------------------------------------------------------------------------------------------

    def create(
        self,
        file: FileBody,
        endpoint: str,
        window: str,
        window_s: int,
        metadata: dict[str, Any] | None,
        output_seconds: int | None,
    ) -> BatchBody:
        """Store a new batch. It starts when all earlier batches have ended.

        Args:
            window: the time limit of the batch, as the client wrote it.
        """
        now = int(self._clock())
        body = BatchBody(
            id=new_record_id("batch"),
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=window,
            status="validating",
            created_at=now,
            expires_at=now + window_s,
            metadata=metadata,
        )
        record = BatchRecord(
            body=body,
            output_id=new_record_id("file"),
            error_id=new_record_id("file"),
            output_seconds=output_seconds,
        )
        self.folder.save_batch(record)
        self._news.set()
        return body

    def get(self, batch_id: str) -> BatchBody | None:
        """Return a batch with its current counts; None if it does not exist."""
        record = self.folder.batch(batch_id)
        return None if record is None else self._counted(record.body)

    def all(self) -> list[BatchBody]:
        """Return the batches, the newest first."""
        return [self._counted(record.body) for record in self.folder.batches()]

    def cancel(self, batch_id: str) -> BatchBody | None:
        """Cancel a batch that has not ended, and return it; None if it does not exist. Its results are kept."""
        record = self.folder.batch(batch_id)
        if record is None or record.body.status not in ACTIVE - {"cancelling"}:
            return None if record is None else record.body
        changed = self._change(record, status="cancelling", cancelling_at=int(self._clock()))
        if self._running is not None and self._running[0] == batch_id:
            self._running[1].cancel()
        self._news.set()
        return self._counted(changed.body)

    def uses(self, file_id: str) -> bool:
        """Return whether a batch that has not ended uses a file as its input."""
        return any(it.body.input_file_id == file_id and it.body.status in ACTIVE for it in self.folder.batches())

    def _counted(self, body: BatchBody) -> BatchBody:
        if self._running is None or self._running[0] != body.id or self._results is None:
            return body
        return msgspec.structs.replace(body, request_counts=self._counts(self._results))

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._news.clear()
            active = [record for record in self.folder.batches() if record.body.status in ACTIVE]
            if not active:
                await self._news.wait()
                continue
            try:
                await self._process(active[-1])  # the oldest
            except Exception:
                logger.exception("batch %s failed", active[-1].body.id)
                problem = BatchProblem("server_error", "the server failed to run the batch; its log has the reason")
                self._fail(active[-1], [problem])

    async def _process(self, record: BatchRecord) -> None:
        """Run a batch until it ends."""
        if record.body.status == "validating":
            checked = await self._validate(record)
            if checked is None:
                return
            record = checked
        path = self.folder.content(record.body.input_file_id)
        self._total = record.body.request_counts.total
        output, errors = self.folder.content(record.output_id), self.folder.content(record.error_id)
        results = await asyncio.to_thread(ResultFiles, output, errors)
        with results:
            self._results = results
            status = "cancelled" if record.body.status == "cancelling" else await self._answer(record, results)
            if status == "expired":
                await asyncio.to_thread(_expire, path, results)
            counts = self._counts(results)
        self._results = None
        self._finish(self.folder.batch(record.body.id) or record, status, counts)

    async def _validate(self, record: BatchRecord) -> BatchRecord | None:
        """Check the input, and return the updated record; None if the input is wrong and the batch has failed."""
        file = self.folder.file(record.body.input_file_id)
        if file is None:
            self._fail(record, [BatchProblem("file_not_found", "the input file no longer exists")])
            return None
        limit = self._settings.max_requests
        path = self.folder.content(file.id)
        total, problems = await asyncio.to_thread(check_input, path, record.body.endpoint, limit)
        record = self.folder.batch(record.body.id) or record
        if problems:
            self._fail(record, problems)
            return None
        counts = RequestCounts(total)
        if record.body.status == "cancelling":
            return self._change(record, request_counts=counts)
        return self._change(record, status="in_progress", in_progress_at=int(self._clock()), request_counts=counts)

    async def _answer(self, record: BatchRecord, results: ResultFiles) -> str:
        """Answer the requests, and return the final state of the batch."""
        left_s = record.body.expires_at - self._clock()
        if left_s <= 0:
            return "expired"
        job = BatchJob(
            self._calls,
            read_lines(self.folder.content(record.body.input_file_id)),
            results,
            limit=RunningLimit(self._settings.max_running, self._settings.max_running_beside, self._num_others),
            priority=self._settings.priority,
        )
        task = asyncio.create_task(job.run())
        self._running = record.body.id, task
        try:
            done, _ = await asyncio.wait({task}, timeout=left_s)
            if not done:
                return "expired"
            if task.cancelled():
                return "cancelled"
            task.result()
            return "completed"
        finally:
            self._running = None
            task.cancel()
            await asyncio.wait({task})

    def _counts(self, results: ResultFiles) -> RequestCounts:
        return RequestCounts(self._total, results.num_completed, results.num_failed)

    def _finish(self, record: BatchRecord, status: str, counts: RequestCounts) -> None:
        """Make the result files available to clients, and store the final state."""
        now = int(self._clock())
        changes: dict[str, Any] = {"finalizing_at": now} if status == "completed" else {}
        expires_at = None if record.output_seconds is None else now + record.output_seconds
        for kind, file_id, count in (
            ("output", record.output_id, counts.completed),
            ("error", record.error_id, counts.failed),
        ):
            content = self.folder.content(file_id)
            if not count:
                content.unlink(missing_ok=True)
                continue
            name = f"{record.body.id}_{kind}.jsonl"
            size = content.stat().st_size
            file = FileBody(
                id=file_id, bytes=size, created_at=now, expires_at=expires_at, filename=name, purpose="batch_output"
            )
            self.folder.save_file(file)
            changes[f"{kind}_file_id"] = file_id
        self._change(record, status=status, request_counts=counts, **changes, **{_TIMES[status]: now})
        logger.info(
            "batch %s is %s: %d requests answered, %d failed, %d in total",
            record.body.id,
            status,
            counts.completed,
            counts.failed,
            counts.total,
        )

    def _fail(self, record: BatchRecord, problems: list[BatchProblem]) -> None:
        errors = BatchProblems(data=problems)
        self._change(record, status="failed", errors=errors, failed_at=int(self._clock()))

    def _change(self, record: BatchRecord, **changes: Any) -> BatchRecord:
        changed = msgspec.structs.replace(record, body=msgspec.structs.replace(record.body, **changes))
        self.folder.save_batch(changed)
        return changed


def _expire(path: Any, results: ResultFiles) -> None:
    """Append an error for each request without a result."""
    error = {"code": "batch_expired", "message": "the completion window ended before the request was answered"}
    for line in read_lines(path):
        if not results.has(line.custom_id):
            result = {"id": new_record_id("batch_req").replace("-", "_"), "response": None, "error": error}
            results.add(line.custom_id, result, is_error=True)
