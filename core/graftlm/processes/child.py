"""The start of a child process: what it is told on standard input, and how it says that it is ready, or why not."""

import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

import msgspec

from graftlm.errors import GraftlmError
from graftlm.logs import configure_logging
from graftlm.processes.channels import Inbox, Outbox, deliver_all
from graftlm.processes.messages import AnyMessage, Failed, LoadTokenizer, Progress, Ready
from graftlm.processes.names import DETOKENIZER, scheduler_index

__all__ = ["ChildSetup", "main", "write_stacks_on_signals"]

logger = logging.getLogger(__name__)


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is told, as one line of JSON.

    Attributes:
        name: "detokenizer", or "scheduler-0" and so on.
        endpoint: where it takes messages.
        main, detokenizer: where it sends them.
        config: as EngineConfig.load takes it, without secrets.
        sys_path: where main imports from, so that plugins are found that are not installed.
        stacks_path: where the stacks of its threads are written on SIGUSR1 and SIGUSR2.
        num_threads: for tensor operations; None leaves it to torch.
        kv_events: `server.kv_events`.
    """

    name: str
    endpoint: str
    main: str
    detokenizer: str
    config: dict[str, Any]
    sys_path: list[str]
    stacks_path: str
    log_format: Literal["text", "json"]
    log_level: str
    num_threads: int | None = None
    kv_events: str | None = None


def write_stacks_on_signals(file: TextIO) -> None:
    """Have this process append the stacks of all threads to a file when it gets SIGUSR1 or SIGUSR2; see `stacks_of`.

    Call it in the main thread. The C handler of SIGUSR1 writes a byte to a pipe, in whichever thread it runs; a thread
    that waits for the byte writes the stacks.
    """
    receiver, sender = os.pipe()

    def write() -> None:
        while True:
            os.read(receiver, 1)
            faulthandler.dump_traceback(file, all_threads=True)

    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    threading.Thread(target=write, name="graftlm-stacks", daemon=True).start()
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def main() -> None:
    """Run the process that standard input describes."""
    stdin = sys.stdin.buffer
    setup = msgspec.json.decode(stdin.readline(), type=ChildSetup)
    sys.path[:] = setup.sys_path
    configure_logging(setup.log_format, setup.log_level, setup.name)
    _obey_main_alone(stdin, Path(setup.stacks_path).parent)
    stacks = Path(setup.stacks_path).open("w")  # noqa: SIM115  # open as long as the process lives
    write_stacks_on_signals(stacks)
    to_main = Outbox(setup.main)
    failed: tuple[str, str] | None = None
    status = 0
    try:
        run = _run_detokenizer if setup.name == DETOKENIZER else _run_scheduler
        run(setup, to_main)
    except GraftlmError as error:
        failed, status = (type(error).__name__, str(error)), 2
    except Exception as error:
        logger.exception("%s ends", setup.name)
        failed, status = ("EngineError", f"{type(error).__name__}: {error}"), 1
    if failed is not None:
        to_main.send(Failed(process=setup.name, pid=os.getpid(), error=failed[0], message=failed[1]))
    deliver_all()
    logging.shutdown()
    os._exit(status)  # threads of plugins may hang; nothing is left to be done


def _obey_main_alone(stdin: BinaryIO, folder: Path) -> None:
    """Leave signals that a terminal or a supervisor sends to the whole group to main, and end when main is gone.

    Args:
        folder: of the sockets, which a main that was killed has left behind.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def wait_for_the_end() -> None:
        stdin.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait_for_the_end, name="graftlm-parent-watch", daemon=True).start()


def _run_detokenizer(setup: ChildSetup, to_main: Outbox) -> None:
    from graftlm.processes.detokenizer_process import DetokenizerProcess
    from graftlm.tokenization.token_decoder import RustTokenDecoder

    DetokenizerProcess(setup.name, Inbox(setup.endpoint), to_main, RustTokenDecoder.from_json).run()


def _run_scheduler(setup: ChildSetup, to_main: Outbox) -> None:
    inbox = Inbox(setup.endpoint)

    def on_stage(stage: str) -> None:
        to_main.send(Progress(process=setup.name, stage=stage))

    on_stage("loading libraries")
    import torch

    from graftlm.assembly.assemble import assemble
    from graftlm.assembly.target import detect_platform
    from graftlm.config import EngineConfig
    from graftlm.processes.kv_events import KVEventPublisher, replica_endpoint
    from graftlm.processes.scheduler_process import SchedulerProcess
    from graftlm.processes.step_metrics import StepMetrics
    from graftlm.registry import Registry
    from graftlm.tokenization import Tokenizer

    early: list[AnyMessage] = []

    def await_tokenizer() -> Tokenizer:
        """Wait for main's, as it came out of the checkpoint, rather than read the checkpoint twice."""
        on_stage("waiting for the tokenizer")
        while True:
            for message in inbox.receive(None):
                if isinstance(message, LoadTokenizer):
                    return Tokenizer.from_json(message.json)
                early.append(message)

    if setup.num_threads is not None:
        torch.set_num_threads(setup.num_threads)
    config = EngineConfig.load(setup.config)
    platform = detect_platform(config)
    on_stage("loading plugins")
    events = None
    if setup.kv_events is not None:
        events = KVEventPublisher(replica_endpoint(setup.kv_events, scheduler_index(setup.name)), setup.name)
    registry = Registry.load(config.plugins, () if events is None else (events,), platform)
    metrics = StepMetrics()
    parts = assemble(
        config,
        registry,
        platform,
        on_stage=on_stage,
        on_step=metrics.observe,
        await_tokenizer=await_tokenizer,
        num_replicas=config.parallel.data,
    )
    process = SchedulerProcess(
        setup.name, parts, metrics, inbox, to_main, Outbox, setup.detokenizer, time.monotonic, events
    )
    # What is here now stays. To look through it for garbage would stop every thread for a tenth of a second and more.
    gc.collect()
    gc.freeze()
    to_main.send(Ready(process=setup.name, pid=os.getpid(), info=parts.summary()))
    process.run(early)
