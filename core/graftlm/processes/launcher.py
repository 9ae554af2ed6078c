"""The child processes of the server: started, watched, restarted, ended."""

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from graftlm import errors
from graftlm.config import EngineConfig
from graftlm.errors import EngineError, GraftlmError
from graftlm.processes.channels import AsyncInbox, Outbox
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

#: A process that dies this often before it is ready is not started again.
MAX_FAILED_STARTS = 3
#: How long a process may take to be started, and again to read its setup: after that it is killed.
START_TIMEOUT_S = 60.0
#: How long it may take to read what a process said before it ended.
_LAST_WORDS_S = 0.2
#: A path of `ipc://` must be shorter than this.
_MAX_SOCKET_PATH = 100

#: Starts a process: command, environment, first line of its standard input.
StartProcess = Callable[[Sequence[str], Mapping[str, str], bytes], Awaitable[ChildProcess]]


class ProcessListener(Protocol):
    """Hears of the processes. Called in the event loop."""

    def receive(self, message: AnyMessage) -> None:
        """Take in what a process says, once it is ready."""
        ...

    def process_ready(self, name: str) -> None:
        """Note that a process takes messages."""
        ...

    def process_died(self, name: str, reason: str) -> None:
        """Note that a process is gone."""
        ...

    def process_stuck(self, name: str, seconds: float) -> None:
        """Note that a process has not answered for a while."""
        ...

    def process_moves(self, name: str) -> None:
        """Note that a process that was stuck answers again."""
        ...

    def give_up(self) -> None:
        """Note that nothing will be started again."""
        ...


class Launcher:
    """Starts a scheduler process for each replica, and one detokenizer, and keeps them going.

    The sockets are in a private folder. A process that takes another's place gets sockets of its own, so that nothing
    that was meant for the dead one reaches it.

    Attributes:
        folder: of the sockets.
        fatal: done, with the reason, when a process has died that is not started again.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        start_process: StartProcess = ChildProcess.start,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._clock = clock
        self._start_process = start_process
        self._start_timeout_s = start_timeout_s
        self.folder = _private_folder()
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
        """The processes that run, by name."""
        return {c.name: c.process.pid for c in self._children.values() if c.process is not None}

    async def start(self) -> None:
        """Start every process; `ready` waits for them."""
        self._inbox = AsyncInbox(self._endpoint("main"))
        self._spawn_task(self._receive(self._inbox))
        for child in self._children.values():
            await self._start(child)

    async def ready(self, tokenizer_json: str) -> list[dict[str, Any]]:
        """Wait until every process is ready.

        Args:
            tokenizer_json: what the detokenizer decodes with, and schedulers tell grammars' tokens by.

        Returns: what each scheduler said of itself.

        Raises:
            GraftlmError: a process could not start; the error is its own.
        """
        self._tokenizer_json = tokenizer_json
        for child in self._children.values():
            self._send_tokenizer(child)
        futures = [child.ready for child in self._children.values() if child.ready is not None]
        infos = await asyncio.gather(*futures)
        return infos[1:]

    def watch(self, listener: ProcessListener) -> None:
        """Tell a listener, from now on, what processes say, and when one dies, is back, or does not move.

        Raises:
            EngineError: one that was ready has ended since.
        """
        for child in self._children.values():
            if child.end is not None:
                raise EngineError(f"{child.name} ended while the others started: {child.end}")
        self._listener = listener
        for name in self._children:
            listener.process_ready(name)
        limit_s, children = self._config.server.watchdog_s, self._children.values()
        self._watchdog = Watchdog(children, limit_s, self._clock, listener.process_stuck, listener.process_moves)
        self._spawn_task(self._watchdog.run())

    def send(self, name: str, message: Message) -> None:
        """Queue a message for a process; dropped when it is down."""
        outbox = self._children[name].outbox
        if outbox is not None:
            outbox.send(message)

    async def close(self) -> None:
        """End every process, and remove the sockets."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # from here on, none is being started
        for child in self._children.values():
            if child.is_ready and child.outbox is not None:
                child.outbox.send(Shutdown())
            elif child.process is not None:  # it would not read messages before it is ready
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
        child.ready.add_done_callback(_look_at)
        child.asked_s, child.is_stuck = None, False
        command = [*command_line(), child.name]  # the name is for people who look at the list of processes
        setup = msgspec.json.encode(self._setup(child)) + b"\n"
        try:
            async with asyncio.timeout(self._start_timeout_s):
                child.process = await self._start_process(command, self._environment(child.name), setup)
        except TimeoutError:
            raise EngineError(f"{child.name} was not started within {self._start_timeout_s:g} s") from None
        except OSError as error:  # such as no memory, or too many files
            raise EngineError(f"{child.name} cannot be started: {error}") from error
        child.end = None
        logger.info("%s runs as pid %d", child.name, child.process.pid)
        asyncio.get_running_loop().call_later(self._start_timeout_s, self._check_start, child, child.process)
        child.outbox = Outbox(child.endpoint)
        self._send_tokenizer(child)
        if child.name == DETOKENIZER:
            for name in self.scheduler_names:  # those that start later are told when they start
                self.send(name, UseDetokenizer(endpoint=child.endpoint))
        self._spawn_task(self._wait_for_end(child, child.process)).add_done_callback(self._watch_ended)

    def _check_start(self, child: ManagedChild, process: ChildProcess) -> None:
        """Kill a process that has not read its setup by now; it then counts as a failed start."""
        is_running = child.process is process and process.returncode is None
        if is_running and not child.stacks_path.exists():  # the process makes this file
            logger.error(
                "%s (pid %d) did nothing for %g s and is killed", child.name, process.pid, self._start_timeout_s
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
            kv_events=server.kv_events,
        )

    def _environment(self, name: str) -> dict[str, str]:
        environment = dict(os.environ)
        if name == DETOKENIZER:
            environment["OMP_NUM_THREADS"] = "1"
        elif self._config.parallel.data > 1 and self._config.model.device != "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = device_of(scheduler_index(name), environment)
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
        assert child.ready is not None  # `_start` has made it
        if not child.ready.done():
            await asyncio.wait({child.ready}, timeout=_LAST_WORDS_S)
        was_ready = child.is_ready
        if not child.ready.done():
            child.ready.set_exception(EngineError(f"{child.name} ended before it was ready: {reason}"))
        if child.outbox is not None:
            child.outbox.close(deliver=False)
        child.outbox = child.process = None
        child.end = reason
        if self._listener is None:
            return  # the start as a whole fails: `ready` raises, or `watch`
        self._listener.process_died(child.name, reason)
        child.failed_starts = 0 if was_ready else child.failed_starts + 1
        if self._config.server.restart and child.failed_starts < MAX_FAILED_STARTS:
            await self._restart(child, self._listener)
        else:
            self._give_up(f"{child.name} ended: {reason}", self._listener)

    async def _restart(self, child: ManagedChild, listener: ProcessListener) -> None:
        start_s = self._clock()
        try:
            await self._start(child)
        except EngineError as error:
            self._give_up(str(error), listener)
            return
        assert child.ready is not None  # `_start` has made it
        with contextlib.suppress(GraftlmError):  # its end is noticed elsewhere
            await child.ready
            if child.is_ready:
                logger.info("%s is back after %.1f s", child.name, self._clock() - start_s)
                listener.process_ready(child.name)

    def _give_up(self, reason: str, listener: ProcessListener | None) -> None:
        if listener is not None:
            listener.give_up()
        if not self.fatal.done():
            self.fatal.set_result(reason)

    # -- what they say -------------------------------------------------------------------------------------------------

    async def _receive(self, inbox: AsyncInbox) -> None:
        while True:
            try:
                self._take(await inbox.receive())
            except MessageError as error:
                logger.error("%s", error)
            except Exception:  # one message must not end the reading of all others
                logger.exception("a message could not be taken in")

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Progress():
                logger.info("%s: %s", message.process, message.stage)
            case Ready() | Failed():
                self._take_start(message)
            case _:
                process = getattr(message, "process", None)
                if process in self._children and self._watchdog is not None:
                    self._watchdog.heard(self._children[process])
                is_ours = isinstance(message, Reply) and message.call_id == PING_ID
                if self._listener is not None and not is_ours:
                    self._listener.receive(message)

    def _take_start(self, message: Ready | Failed) -> None:
        child = self._children[message.process]
        future = child.ready
        is_present = child.process is not None and child.process.pid == message.pid
        if future is None or future.done() or not is_present:
            if isinstance(message, Failed):
                logger.error("%s failed: %s", message.process, message.message)
        elif isinstance(message, Ready):
            future.set_result(message.info)
        else:
            future.set_exception(_error_named(message.error, message.message))

    # -- small things --------------------------------------------------------------------------------------------------

    def _endpoint(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}"

    def _spawn_task(self, work: Any) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _watch_ended(self, task: "asyncio.Task[None]") -> None:
        """Give up where waiting for a process's end has failed: nobody would start another."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a process is no longer watched", exc_info=error)
            self._give_up(f"{type(error).__name__}: {error}", self._listener)


def _config_of(child: ManagedChild, config: EngineConfig) -> dict[str, Any]:
    """Return what a child's engine is made of. One that takes another's place is told of its adapters by main."""
    sections = config.model_dump(mode="json", exclude={"server"})
    if child.generation > 1 and config.lora.takes_adapters:
        sections["lora"] |= {"adapters": {}, "enabled": True}
    return sections


def _private_folder() -> Path:
    """Make a folder that only this user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="graftlm-"))  # mkdtemp makes it 0700
    if len(str(folder)) > _MAX_SOCKET_PATH - len("/scheduler-63-99999"):
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="graftlm-", dir="/tmp"))
    return folder


def _look_at(future: "asyncio.Future[Any]") -> None:
    """Count a future's error as seen: when several processes fail, only the first one's is raised."""
    if not future.cancelled():
        future.exception()


def _error_named(name: str, message: str) -> GraftlmError:
    """Return the error of a class in `graftlm.errors`."""
    kind = getattr(errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, GraftlmError) else EngineError(message)
