"""The start of a child process, which reads its setup from standard input and reports readiness or an error."""

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
from graftlm.runtime.garbage import collection_paused

__all__ = ["ChildSetup", "end_with_main", "main", "write_stacks_on_signals"]

logger = logging.getLogger(__name__)


class ChildSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The setup of a child process. The main process ("main" in this package) sends it as one line of JSON.

    Attributes:
        name: name of the process: "detokenizer", "scheduler-0", "scheduler-1" and so on.
        endpoint: address at which the process receives messages.
        main, detokenizer: addresses to which the process sends messages.
        config: the configuration, in the form that `EngineConfig.load` accepts, without secrets.
        sys_path: main's `sys.path`, so that the child finds plugins that are not installed.
        stacks_path: file to which the process writes the stacks of its threads on SIGUSR1 and SIGUSR2.
        log_format: `server.log_format`.
        log_level: `server.log_level`.
        num_threads: number of threads for tensor operations; None for torch's default.
        kv_events: `server.kv_events`.
        block_tokens: number of tokens in a block of the routing policy; None if the policy needs no cache events.
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
    kv_events: dict[str, Any] = {}
    block_tokens: int | None = None


def write_stacks_on_signals(file: TextIO) -> None:
    """Install handlers of SIGUSR1 and SIGUSR2 that append the stacks of all threads to a file, for `stacks_of`.

    Must be called in the main thread. For SIGUSR1, the C signal handler writes a byte to a pipe, and a thread that
    waits for this byte writes the stacks. For SIGUSR2, the C signal handler writes the stacks.
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
    """Read the setup from standard input and run the process."""
    stdin = sys.stdin.buffer
    setup = msgspec.json.decode(stdin.readline(), type=ChildSetup)
    sys.path[:] = setup.sys_path
    configure_logging(setup.log_format, setup.log_level, setup.name)
    end_with_main(stdin, Path(setup.stacks_path).parent)
    stacks = Path(setup.stacks_path).open("w")  # noqa: SIM115  # stays open until the process ends
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
        logger.exception("%s ends with an error", setup.name)
        failed, status = ("EngineError", f"{type(error).__name__}: {error}"), 1
    if failed is not None:
        to_main.send(Failed(process=setup.name, pid=os.getpid(), error=failed[0], message=failed[1]))
    deliver_all()
    logging.shutdown()
    os._exit(status)  # a normal exit would wait for plugins' threads, which may hang


def end_with_main(stdin: BinaryIO, folder: Path) -> None:
    """End this process when main ends. SIGINT and SIGTERM are ignored, because main handles them for all processes.

    Args:
        stdin: the standard input, which main keeps open.
        folder: the folder of the sockets. This process removes it, since main may have been killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def wait_for_main_to_end() -> None:
        stdin.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=wait_for_main_to_end, name="graftlm-parent-watch", daemon=True).start()


def _run_detokenizer(setup: ChildSetup, to_main: Outbox) -> None:
    from graftlm.processes.detokenizer_process import DetokenizerProcess
    from graftlm.tokenization.token_decoder import RustTokenDecoder

    DetokenizerProcess(setup.name, Inbox(setup.endpoint), to_main, RustTokenDecoder.from_json).run()


def _run_scheduler(setup: ChildSetup, to_main: Outbox) -> None:
    inbox = Inbox(setup.endpoint)

    def on_stage(stage: str) -> None:
        to_main.send(Progress(process=setup.name, stage=stage))

    on_stage("loading libraries")
    with collection_paused():
        import torch

        from graftlm.assembly.assemble import assemble
        from graftlm.assembly.target import detect_platform
        from graftlm.config import EngineConfig, KVEventSettings
        from graftlm.lora.adapters import adapter_name
        from graftlm.processes.kv_publishing import make_publisher
        from graftlm.processes.routing import CacheReporter
        from graftlm.processes.scheduler_process import SchedulerProcess
        from graftlm.processes.step_metrics import StepMetrics
        from graftlm.registry import Registry
        from graftlm.tokenization import Tokenizer

    early: list[AnyMessage] = []

    def await_tokenizer() -> Tokenizer:
        """Wait for the tokenizer from the main process, and return it. Children do not read it from files."""
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
    events = make_publisher(
        KVEventSettings(**setup.kv_events), setup.name, scheduler_index(setup.name), config.cache.page_size
    )
    reporter = None if setup.block_tokens is None else CacheReporter(setup.block_tokens, setup.name)
    observers = [observer for observer in (events, reporter) if observer is not None]
    registry = Registry.load(config.plugins, observers, platform)
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
    if events is not None and (adapters := parts.adapters) is not None:
        events.adapter_name = lambda digest: adapter_name(adapters.loaded, digest)
    process = SchedulerProcess(
        setup.name, parts, metrics, inbox, to_main, Outbox, setup.detokenizer, time.monotonic, events, reporter
    )
    # The objects that exist now live until the process ends. Without `freeze`, each full garbage collection would scan
    # these objects and stop all threads for 0.1 s or more.
    gc.collect()
    gc.freeze()
    to_main.send(Ready(process=setup.name, pid=os.getpid(), info=parts.summary()))
    process.run(early)
