"""The launcher, which starts, watches, restarts and ends the server's child processes."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from graftlm import errors
from graftlm.config import EngineConfig
from graftlm.errors import EngineError, GraftlmError
from graftlm.processes.channels import AsyncInbox, Outbox, private_folder
from graftlm.processes.child import ChildSetup
from graftlm.processes.managed_child import ManagedChild
from graftlm.processes.messages import (
    PING_ID,
    AnyMessage,
    Failed,
    LoadTokenizer,
    Message,
    MessageError,
    Progress,
    Ready,
    Reply,
    Shutdown,
    UseDetokenizer,
)
from graftlm.processes.names import DETOKENIZER, scheduler_index, scheduler_name
from graftlm.processes.os_process import ChildProcess, command_line, describe_end, device_of, end
from graftlm.processes.watchdog import Watchdog

__all__ = ["Launcher", "ProcessListener"]

logger = logging.getLogger(__name__)

#: A process is not restarted after this number of consecutive deaths before it was ready.
MAX_FAILED_STARTS = 3
#: Time limit in seconds for starting a process, and again for the process to read its setup. A process that exceeds the
#: second limit is killed.
START_TIMEOUT_S = 60.0
#: Seconds to wait for the last messages of a process that has ended.
_LAST_MESSAGES_S = 0.2

#: Starts a process. Arguments: the command, the environment, the first line of its standard input.
StartProcess = Callable[[Sequence[str], Mapping[str, str], bytes], Awaitable[ChildProcess]]


class ProcessListener(Protocol):
    """Receives the messages of the processes, and changes of their state. Called in the event loop."""

    def receive(self, message: AnyMessage) -> None:
        """Handle a message of a ready process."""
        ...

    def process_ready(self, name: str) -> None:
        """Handle a process that has become ready for messages."""
        ...

    def process_died(self, name: str, reason: str) -> None:
        """Handle the end of a process."""
        ...

    def process_stuck(self, name: str, seconds: float) -> None:
        """Handle a process that has not answered a ping for this number of seconds."""
        ...

    def process_recovered(self, name: str) -> None:
        """Handle a stuck process that answers again."""
        ...

    def restarts_ended(self) -> None:
        """Handle the end of restarts: from now on, processes that die are not restarted."""
        ...


class Launcher:
    """Starts one scheduler process per replica and one detokenizer, and restarts processes that die.

    The sockets are in a private folder. A process that replaces a dead process gets new sockets, so that it receives no
    messages for the dead process.

    Args:
        clock: a monotonic clock, in seconds.
        start_process: starts a process.
        start_timeout_s: time limit that replaces `START_TIMEOUT_S`.

    Attributes:
        folder: the folder of the sockets.
        fatal: future that is done when a process has died and is not restarted. Its result is the reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        start_process: StartProcess = ChildProcess.start,
        start_timeout_s: float = START_TIMEOUT_S,
        block_tokens: int | None = None,
    ) -> None:
        self._config = config
        self._block_tokens = block_tokens
        self._clock = clock
        self._start_process = start_process
        self._start_timeout_s = start_timeout_s
        self.folder = private_folder()
        self._children = {name: ManagedChild(name) for name in [DETOKENIZER, *self.scheduler_names]}
        self._listener: ProcessListener | None = None
        self._watchdog: Watchdog | None = None
        self._inbox: AsyncInbox | None = None
        self._tokenizer_json: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self.fatal: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def scheduler_names(self) -> Sequence[str]:
        """The names of the scheduler processes."""
        return [scheduler_name(i) for i in range(self._config.parallel.data)]

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of each running process."""
        return {c.name: c.process.pid for c in self._children.values() if c.process is not None}

    async def start(self) -> None:
        """Start every process. Call `ready` to wait until the processes are ready.

        Raises:
            EngineError: a process cannot be started.
        """
        self._inbox = AsyncInbox(self._endpoint("main"))
        self._spawn_task(self._receive(self._inbox))
        for child in self._children.values():
            await self._start(child)

    async def ready(self, tokenizer_json: str) -> list[dict[str, Any]]:
        """Wait until every process is ready.

        Args:
            tokenizer_json: the tokenizer as JSON. The detokenizer uses it to decode, and the schedulers for grammars.

        Returns: the `info` of each scheduler's Ready message.

        Raises:
            GraftlmError: the error of the first process that failed to start.
        """
        self._tokenizer_json = tokenizer_json
        for child in self._children.values():
            self._send_tokenizer(child)
        futures = [child.ready for child in self._children.values() if child.ready is not None]
        infos = await asyncio.gather(*futures)
        return infos[1:]

    def watch(self, listener: ProcessListener) -> None:
        """Report messages and state changes of the processes to a listener from now on.

        Raises:
            EngineError: a ready process has ended.
        """
        for child in self._children.values():
            if child.end is not None:
                raise EngineError(f"{child.name} ended while the other processes started: {child.end}")
        self._listener = listener
        for name in self._children:
            listener.process_ready(name)
        limit_s, children = self._config.server.watchdog_s, self._children.values()
        self._watchdog = Watchdog(children, limit_s, self._clock, listener.process_stuck, listener.process_recovered)
        self._spawn_task(self._watchdog.run())

    def send(self, name: str, message: Message) -> None:
        """Queue a message for a process. The message is dropped if the process is not running."""
        outbox = self._children[name].outbox
        if outbox is not None:
            outbox.send(message)

    async def close(self) -> None:
        """End every process, and remove the sockets."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # from here on, no process is being started
        for child in self._children.values():
            if child.is_ready and child.outbox is not None:
                child.outbox.send(Shutdown())
            elif child.process is not None:  # a process that is not ready reads no messages
                child.process.kill()
        await asyncio.gather(*[end(child.process) for child in self._children.values() if child.process is not None])
        for child in self._children.values():
            if child.outbox is not None:
                child.outbox.close(deliver=False)
            child.outbox = child.process = None
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- one process ---------------------------------------------------------------------------------------------------

    async def _start(self, child: ManagedChild) -> None:
        child.generation += 1
        child.endpoint = self._endpoint(f"{child.name}-{child.generation}")
        child.stacks_path = self.folder / f"{child.name}-{child.generation}.stacks"
        child.ready = asyncio.get_running_loop().create_future()
        child.ready.add_done_callback(_mark_retrieved)
        child.pinged_s, child.is_stuck, child.last_error = None, False, None
        command = [*command_line(), child.name]  # the name is only shown in the system's process list
        setup = msgspec.json.encode(self._setup(child)) + b"\n"
        try:
            async with asyncio.timeout(self._start_timeout_s):
                child.process = await self._start_process(command, self._environment(child.name), setup)
        except TimeoutError:
            raise EngineError(f"{child.name} was not started within {self._start_timeout_s:g} s") from None
        except OSError as error:  # for example not enough memory, or too many open files
            raise EngineError(f"{child.name} cannot be started: {error}") from error
        child.end = None
        logger.info("%s runs as pid %d", child.name, child.process.pid)
        asyncio.get_running_loop().call_later(self._start_timeout_s, self._check_start, child, child.process)
        child.outbox = Outbox(child.endpoint)
        self._send_tokenizer(child)
        if child.name == DETOKENIZER:
            for name in self.scheduler_names:  # schedulers that start later read the endpoint from their setup
                self.send(name, UseDetokenizer(endpoint=child.endpoint))
        self._spawn_task(self._wait_for_end(child, child.process)).add_done_callback(self._watch_ended)

    def _check_start(self, child: ManagedChild, process: ChildProcess) -> None:
        """Kill a process that has not read its setup in time. This counts as a failed start."""
        is_running = child.process is process and process.returncode is None
        if is_running and not child.stacks_path.exists():  # the process creates this file after it has read its setup
            logger.error(
                "%s (pid %d) has not read its setup within %g s and is killed",
                child.name,
                process.pid,
                self._start_timeout_s,
            )
            process.kill()

    def _setup(self, child: ManagedChild) -> ChildSetup:
        config, server = self._config, self._config.server
        cores = os.cpu_count() or 1
        replicas = config.parallel.data
        return ChildSetup(
            name=child.name,
            endpoint=child.endpoint,
            main=self._endpoint("main"),
            detokenizer=self._children[DETOKENIZER].endpoint,
            config=_config_of(child, config),
            sys_path=sys.path,
            stacks_path=str(child.stacks_path),
            log_format=server.log_format,
            log_level=server.log_level,
            num_threads=max(1, cores // replicas) if replicas > 1 else None,
            kv_events=server.kv_events.model_dump(),
            block_tokens=self._block_tokens,
        )

    def _environment(self, name: str) -> dict[str, str]:
        environment = dict(os.environ)
        if name == DETOKENIZER:
            environment["OMP_NUM_THREADS"] = "1"
        elif self._config.parallel.data > 1 and self._config.model.device != "cpu":
            num_ranks = self._config.parallel.tensor
            first = scheduler_index(name) * num_ranks
            devices = [device_of(first + rank, environment) for rank in range(num_ranks)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return environment

    def _send_tokenizer(self, child: ManagedChild) -> None:
        if self._tokenizer_json is not None and child.outbox is not None:
            child.outbox.send(LoadTokenizer(json=self._tokenizer_json))

    async def _wait_for_end(self, child: ManagedChild, process: ChildProcess) -> None:
        status = await process.wait()
        if self._closing or child.process is not process:
            return
        reason = describe_end(status)
        logger.error("%s (pid %d) ended: %s", child.name, process.pid, reason)
        assert child.ready is not None  # `_start` has set it
        if child.is_ready and status > 0:
            await _wait_until(lambda: child.last_error is not None, _LAST_MESSAGES_S)
            reason = f"{reason}: {child.last_error}" if child.last_error is not None else reason
        if not child.ready.done():
            await asyncio.wait({child.ready}, timeout=_LAST_MESSAGES_S)
        was_ready = child.is_ready
        if not child.ready.done():
            child.ready.set_exception(EngineError(f"{child.name} ended before it was ready: {reason}"))
        if child.outbox is not None:
            child.outbox.close(deliver=False)
        child.outbox = child.process = None
        child.end = reason
        if self._listener is None:
            return  # `ready` or `watch` raises the error, and the server's start fails
        self._listener.process_died(child.name, reason)
        child.failed_starts = 0 if was_ready else child.failed_starts + 1
        if self._config.server.restart and child.failed_starts < MAX_FAILED_STARTS:
            await self._restart(child, self._listener)
        else:
            self._end_restarts(f"{child.name} ended: {reason}", self._listener)

    async def _restart(self, child: ManagedChild, listener: ProcessListener) -> None:
        start_s = self._clock()
        try:
            await self._start(child)
        except EngineError as error:
            self._end_restarts(str(error), listener)
            return
        assert child.ready is not None  # `_start` has set it
        with contextlib.suppress(GraftlmError):  # `_wait_for_end` handles the end of the process
            await child.ready
            if child.is_ready:
                logger.info("%s is ready again after %.1f s", child.name, self._clock() - start_s)
                listener.process_ready(child.name)

    def _end_restarts(self, reason: str, listener: ProcessListener | None) -> None:
        if listener is not None:
            listener.restarts_ended()
        if not self.fatal.done():
            self.fatal.set_result(reason)

    # -- messages of the processes -------------------------------------------------------------------------------------

    async def _receive(self, inbox: AsyncInbox) -> None:
        while True:
            try:
                self._handle(await inbox.receive())
            except MessageError as error:
                logger.error("%s", error)
            except Exception:  # an error of one message must not end the handling of later messages
                logger.exception("a message could not be handled")

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case Progress():
                logger.info("%s: %s", message.process, message.stage)
            case Ready() | Failed():
                self._handle_start(message)
            case _:
                process = getattr(message, "process", None)
                if process in self._children and self._watchdog is not None:
                    self._watchdog.message_received(self._children[process])
                is_ping = isinstance(message, Reply) and message.call_id == PING_ID
                if self._listener is not None and not is_ping:
                    self._listener.receive(message)

    def _handle_start(self, message: Ready | Failed) -> None:
        child = self._children[message.process]
        future = child.ready
        is_current = child.process is not None and child.process.pid == message.pid
        if future is None or future.done() or not is_current:
            if isinstance(message, Failed):
                logger.error("%s failed: %s", message.process, message.message)
                child.last_error = message.message if is_current else None
        elif isinstance(message, Ready):
            future.set_result(message.info)
        else:
            future.set_exception(_error_named(message.error, message.message))

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def _spawn_task(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch_ended(self, task: "asyncio.Task[None]") -> None:
        """End the restarts if `_wait_for_end` has failed, since `_wait_for_end` restarts a process that dies."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a process is no longer watched", exc_info=error)
            self._end_restarts(f"{type(error).__name__}: {error}", self._listener)


def _config_of(child: ManagedChild, config: EngineConfig) -> dict[str, Any]:
    """Return the configuration for a child, without `server`.

    The configuration of a process that replaces a dead process contains no adapters, because main sends a call that
    loads the current adapters.
    """
    sections = config.model_dump(mode="json", exclude={"server"})
    if child.generation > 1 and config.lora.takes_adapters:
        sections["lora"] |= {"adapters": {}, "enabled": True}
    return sections


async def _wait_until(is_done: Callable[[], bool], timeout_s: float) -> None:
    """Wait until a condition holds, or until the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not is_done():
                await asyncio.sleep(timeout_s / 20)


def _mark_retrieved(future: "asyncio.Future[Any]") -> None:
    """Mark a future's error as retrieved. If several processes fail, only the first error is raised."""
    if not future.cancelled():
        future.exception()


def _error_named(name: str, message: str) -> GraftlmError:
    """Return an error of the class `name` in `graftlm.errors`; an EngineError if there is no such class."""
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, GraftlmError) else EngineError(message)
