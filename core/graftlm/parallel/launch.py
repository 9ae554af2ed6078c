"""Creates the context with which an executor starts the processes of ranks."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from graftlm.contracts import ExecutorContext, RankLaunch, RankOptions, RankProcesses, StepExecutor
from graftlm.logs import current_settings
from graftlm.parallel.protocol import RankSetup
from graftlm.parallel.rank_group import RankGroup

__all__ = ["rank_context"]


def rank_context(
    size: int,
    folder: Path,
    worker: str,
    arguments: Mapping[str, Any],
    *,
    options: RankOptions,
    device: str,
    num_threads: int | None,
    run_here: Callable[[], StepExecutor],
    environment_of: Callable[[int], Mapping[str, str]] = lambda rank: {},
    on_stage: Callable[[str], None],
    on_group: Callable[[RankGroup], None],
) -> ExecutorContext:
    """Return the context of an executor.

    Args:
        size: number of ranks.
        folder: a private folder for sockets, which may be removed when all ranks have started.
        worker, arguments: the function that creates the ranks' workers; see `RankSetup`.
        options: the deadlines.
        device: torch device type.
        num_threads: number of threads of each rank; None: torch's default.
        run_here: see `ExecutorContext`.
        environment_of: function that returns further variables for the process of a rank.
        on_stage: function that is called with the stages of each rank.
        on_group: function that is called with the group when it has started.
    """
    inbox = f"ipc://{folder}/scheduler"
    outboxes = [f"ipc://{folder}/rank-{rank}" for rank in range(size)]
    log_format, log_level, process = current_settings()

    def run_on(processes: RankProcesses) -> StepExecutor:
        timeouts = {"timeout_s": options.timeout_s, "start_timeout_s": options.start_timeout_s}
        group = RankGroup(processes, inbox, outboxes, on_stage=on_stage, **timeouts)
        on_group(group)
        return group

    def launch(rank: int) -> RankLaunch:
        setup = RankSetup(
            name=f"rank-{rank}" if process is None else f"{process}/rank-{rank}",
            rank=rank,
            size=size,
            inbox=outboxes[rank],
            scheduler=inbox,
            store=str(folder / "store"),
            device=device,
            timeout_s=options.timeout_s,
            start_timeout_s=options.start_timeout_s,
            worker=worker,
            arguments=dict(arguments),
            sys_path=sys.path,
            log_format=log_format,
            log_level=log_level,
            num_threads=num_threads,
        )
        command = (sys.executable, "-P", "-m", "graftlm.parallel", setup.name)
        return RankLaunch(rank, command, environment_of(rank), msgspec.json.encode(setup) + b"\n")

    return ExecutorContext(tuple(map(launch, range(size))), run_here, run_on)
