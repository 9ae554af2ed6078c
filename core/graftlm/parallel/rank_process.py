"""The process of a rank: `python -m graftlm.parallel`, with the setup on standard input."""

import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import zmq

from graftlm.contracts import Communicator
from graftlm.errors import RankFailedError
from graftlm.logs import configure_logging
from graftlm.parallel import protocol
from graftlm.parallel.protocol import RankSetup
from graftlm.parallel.rank_loop import RankLoop
from graftlm.parallel.worker import CreateWorker, RankWorker

__all__ = ["main"]

logger = logging.getLogger(__name__)

#: Milliseconds for which the process waits at its end until its last messages have been sent.
_LINGER_MS = 1000


def main() -> None:
    """Read the setup from standard input, create the worker, and run plans until the scheduler ends the process."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankSetup)
    sys.path[:] = setup.sys_path
    configure_logging(setup.log_format, setup.log_level, setup.name)
    _end_with_scheduler(sys.stdin.buffer)
    mailbox = _Mailbox(setup)
    status = 0
    try:
        _run(setup, mailbox)
    except Exception as error:
        _report(setup, mailbox, error)
        status = 1
    mailbox.close()
    logging.shutdown()
    os._exit(status)  # a normal exit would wait for threads of plugins and of torch.distributed, which may hang


def _run(setup: RankSetup, mailbox: "_Mailbox") -> None:
    mailbox.stage("loading libraries")
    import torch

    if setup.num_threads is not None:
        torch.set_num_threads(setup.num_threads)
    communicator = _communicator(setup) if setup.size > 1 else None
    worker = _create_worker(setup, communicator, mailbox.stage)
    if communicator is not None:
        communicator.timeout_s = setup.timeout_s

    def fail(error: Exception) -> None:
        mailbox.during = loop.during
        _report(setup, mailbox, error)
        mailbox.close()
        os._exit(1)

    loop = RankLoop(
        setup.rank,
        worker,
        mailbox.inbox,
        mailbox.send,
        setup.timeout_s,
        fail=None if setup.device == "cpu" else fail,
    )
    gc.collect()
    gc.freeze()  # the objects that exist now live until the process ends
    mailbox.send([protocol.READY, protocol.encode([setup.rank, dict(worker.info)])])
    try:
        loop.run()
    finally:
        mailbox.during = loop.during


def _communicator(setup: RankSetup) -> Communicator:
    import torch

    from graftlm.layers.kernel_build import user_cache_dir
    from graftlm.parallel.shared_communicator import join_shared_memory
    from graftlm.parallel.torch_communicator import TorchCommunicator, file_store

    path = Path(setup.store)
    device = torch.device(setup.device)
    communicator = TorchCommunicator(
        file_store(path, setup.size), setup.rank, setup.size, device, setup.start_timeout_s
    )
    if device.type != "cpu":
        return communicator
    return join_shared_memory(communicator, path.with_name("shared"), "g++", user_cache_dir(os.environ))


def _create_worker(setup: RankSetup, communicator: Communicator | None, on_stage: Callable[[str], None]) -> RankWorker:
    module, _, name = setup.worker.partition(":")
    create: CreateWorker = getattr(importlib.import_module(module), name)
    return create(setup, communicator, on_stage)


def _report(setup: RankSetup, mailbox: "_Mailbox", error: Exception) -> None:
    if isinstance(error, RankFailedError):  # the other rank is the cause
        logger.error("%s ends: %s", setup.name, error)
    else:
        logger.error("%s ends with an error during %s", setup.name, mailbox.during, exc_info=error)
    failure = protocol.Failure(setup.rank, type(error).__name__, str(error), mailbox.during)
    mailbox.send([protocol.FAILED, protocol.encode(failure)])


def _end_with_scheduler(stdin: BinaryIO) -> None:
    """End this process when the scheduler's process ends, and ignore signals, which the scheduler's parent handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def wait() -> None:
        stdin.read()
        os._exit(0)

    threading.Thread(target=wait, name="graftlm-parent-watch", daemon=True).start()


class _Mailbox:
    """The sockets of a rank.

    Attributes:
        inbox: bound PULL socket.
        during: what the rank does, for the report of an error.
    """

    def __init__(self, setup: RankSetup) -> None:
        self.during = "its start"
        self._rank = setup.rank
        self._context: zmq.Context[Any] = zmq.Context()
        self.inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self.inbox.set_hwm(0)
        self.inbox.bind(setup.inbox)
        self._scheduler: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._scheduler.set_hwm(0)
        self._scheduler.connect(setup.scheduler)
        self._lock = threading.Lock()

    def send(self, message: list[bytes]) -> None:
        """Queue a message for the scheduler. Any thread may call this method."""
        with self._lock:
            self._scheduler.send_multipart(message)

    def stage(self, stage: str) -> None:
        """Report a stage of the start."""
        self.during = stage
        self.send([protocol.STAGE, protocol.encode(protocol.Stage(self._rank, stage))])

    def close(self) -> None:
        """Send the queued messages and close the sockets."""
        self._context.destroy(linger=_LINGER_MS)
