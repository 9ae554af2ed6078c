"""Answers a file of requests. It starts the model's processes, but no HTTP server."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from graftlm.assembly.machine_check import check_files
from graftlm.config import EngineConfig
from graftlm.errors import ConfigError, EngineError, RequestError
from graftlm.logs import configure_logging
from graftlm.processes.launcher import Launcher
from graftlm.processes.routing import make_router
from graftlm.processes.tokenizer_manager import TokenizerManager
from graftlm.registry import Registry, check, probe_platform
from graftlm.server import openai
from graftlm.server.app import create_local_app
from graftlm.server.batches.input_lines import check_input, read_lines
from graftlm.server.batches.job import BatchJob
from graftlm.server.batches.local_calls import LocalCalls
from graftlm.server.batches.result_files import ResultFiles
from graftlm.server.batches.running_limit import RunningLimit
from graftlm.server.metrics import ServerMetrics

__all__ = ["FileResult", "answer_file"]

#: Maximum number of input problems that an error message lists.
_MAX_SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class FileResult:
    """The result of a run.

    Attributes:
        num_total: number of requests in the input.
        num_known: number of results before the run.
        num_completed, num_failed: numbers of results after the run.
    """

    num_total: int
    num_known: int
    num_completed: int
    num_failed: int

    @property
    def is_whole(self) -> bool:
        """Whether every request has a result."""
        return self.num_completed + self.num_failed == self.num_total


def answer_file(
    config: EngineConfig,
    requests: Path,
    output: Path,
    errors: Path,
    progress: Callable[[int], AbstractContextManager[Callable[[], None]]],
) -> FileResult:
    """Answer the requests of a file that have no result yet. SIGINT and SIGTERM end the run early.

    Args:
        output, errors: the files of results. Existing results are not changed.
        progress: called with the number of requests to answer. It returns a context manager that yields a function,
            which is called after each result.

    Raises:
        GraftlmError: the input, the configuration, a plugin or the checkpoint is invalid.
    """
    try:
        num_total, problems = check_input(requests, None, config.server.batches.max_requests)
    except OSError as error:
        raise RequestError(f"cannot read {requests}: {error.strerror}") from error
    if problems:
        shown = [f"{requests}:{problem.line or 1}: {problem.message}" for problem in problems[:_MAX_SHOWN]]
        raise RequestError("\n".join(shown))
    configure_logging(config.server.log_format, config.server.log_level, "main")
    registry = Registry.load(config.plugins, platform=probe_platform(config.model.device))
    wrong = check(config, registry).errors + check_files(config, registry)
    if wrong:
        raise ConfigError("\n".join(wrong))
    with ResultFiles(output, errors) as results:
        num_known = results.num_completed + results.num_failed
        if num_known < num_total:
            with progress(num_total - num_known) as advance:
                asyncio.run(_answer(config, registry, requests, results, advance))
        return FileResult(num_total, num_known, results.num_completed, results.num_failed)


async def _answer(
    config: EngineConfig, registry: Registry, requests: Path, results: ResultFiles, advance: Callable[[], None]
) -> None:
    task = asyncio.ensure_future(_run(config, registry, requests, results, advance))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _run(
    config: EngineConfig, registry: Registry, requests: Path, results: ResultFiles, advance: Callable[[], None]
) -> None:
    router = make_router(config, registry)
    launcher = Launcher(config, block_tokens=router.event_block_tokens)
    manager: TokenizerManager | None = None
    try:
        await launcher.start()
        assembly = await asyncio.to_thread(import_module, "graftlm.processes.assembly")  # imports torch
        manager = await assembly.assemble_manager(config, registry, launcher, ServerMetrics(), None, router)
        calls = LocalCalls(create_local_app(openai.make_router(manager)))
        max_running = config.scheduling.max_running_requests * config.parallel.data
        limit = RunningLimit(max_running, max_running)
        job = BatchJob(calls, read_lines(requests), results, limit=limit, priority=0, on_result=advance)
        answering = asyncio.ensure_future(job.run())
        either: set[asyncio.Future[Any]] = {answering, launcher.fatal}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise EngineError(f"{launcher.fatal.result()}; run the command again to continue")
            answering.result()
        finally:
            answering.cancel()
            await asyncio.wait({answering})
    finally:
        if manager is not None:
            manager.close()
        await launcher.close()
