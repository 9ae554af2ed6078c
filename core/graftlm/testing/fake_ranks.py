"""Ranks without a model: they add up token ids, and fail on request."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from graftlm.contracts import Communicator, ExecutorContext, RankOptions, StepExecutor
from graftlm.errors import ConfigError, RequestError
from graftlm.execution.executor import Launched, WorkerExecutor
from graftlm.parallel.launch import rank_context
from graftlm.parallel.protocol import RankSetup
from graftlm.plan import LateMask, StepPlan, StepResult

__all__ = ["FAULTS", "FakeRank", "create", "fake_executor", "fake_plan"]

#: Fault -> the token id that causes it in a plan.
FAULTS: Final[Mapping[str, int]] = {"raises": 1001, "is killed": 1002, "hangs": 1003, "ends": 1004}


def create(setup: RankSetup, communicator: Communicator | None, on_stage: Callable[[str], None]) -> "FakeRank":
    """Return the fake worker of a rank.

    The argument `refuse` is a message with which rank 1 refuses to start; with `is_idle`, steps compute nothing.
    """
    on_stage("pretending")
    if setup.rank == 1 and setup.arguments.get("refuse"):
        raise ConfigError(setup.arguments["refuse"])
    return FakeRank(setup.rank, communicator, is_idle=bool(setup.arguments.get("is_idle")))


class FakeRank:
    """A worker and its runner. A step's result has one token: the sum of the plan's token ids over all ranks.

    If the plan has a mask, the sum of its bits is added. The result's pooled vector has the ids of all steps that the
    rank has run.
    """

    def __init__(self, rank: int, communicator: Communicator | None, *, is_idle: bool = False) -> None:
        self._rank = rank
        self._is_idle = is_idle
        self._communicator = communicator
        self._step_ids: list[int] = []

    @property
    def runner(self) -> "FakeRank":
        """This object."""
        return self

    @property
    def info(self) -> Mapping[str, Any]:
        """The rank, and a summary for the log."""
        return {"rank": self._rank, "summary": "a fake"}

    def call(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        """Return the ids of all steps so far for "steps", and refuse "refuse".

        Raises:
            RequestError: the operation is "refuse".
        """
        if operation == "refuse":
            raise RequestError(f"rank {self._rank} refuses {arguments['what']}")
        return self._step_ids

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> Launched:
        """Run a step; its result is known at once."""
        if self._is_idle:
            return _Done(StepResult(plan.input_ids[plan.sample_idx], {}, None, (), 0.0))
        self._step_ids.append(plan.step_id)
        if len(plan.positions) and plan.positions[0] == self._rank:
            _fail(int(plan.input_ids[0]))
        total = torch.tensor([float(plan.input_ids.sum())])
        if self._communicator is not None:
            self._communicator.all_reduce(total)
        mask = None if plan.token_mask is None else plan.token_mask.wait()
        if mask is not None:
            total += int(mask.bits.sum())
        return _Done(
            StepResult(total.long().numpy(), {}, None, (), 0.5, pooled=(np.array(self._step_ids, dtype=np.float32),))
        )


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


def _fail(token_id: int) -> None:
    if token_id == FAULTS["raises"]:
        raise ValueError("layer 3 is broken")
    if token_id == FAULTS["is killed"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if token_id == FAULTS["hangs"]:
        time.sleep(600)
    if token_id == FAULTS["ends"]:
        os._exit(3)


def fake_plan(step_id: int, token_id: int = 1, rank: int = -1, *, num_masks: int = 0) -> StepPlan:
    """Return the plan of one request with one token.

    Args:
        token_id: the token; one of `FAULTS` makes a rank fail.
        rank: the rank that fails; -1: none.
        num_masks: number of samples with a mask.
    """
    one = np.zeros(1, dtype=np.int64)
    return StepPlan(
        step_id=step_id,
        rows=np.zeros(1, dtype=np.int32),
        query_lens=np.ones(1, dtype=np.int32),
        seq_lens=np.ones(1, dtype=np.int32),
        page_table=np.zeros((1, 3), dtype=np.int32),
        input_ids=one + token_id,
        device_idx=one[:0],
        positions=one + rank,
        out_slots=one,
        num_decodes=1,
        sample_idx=one,
        sample_positions=one,
        token_mask=LateMask(np.arange(num_masks)) if num_masks else None,
    )


def fake_executor(
    num_ranks: int,
    create: Callable[[ExecutorContext], StepExecutor],
    *,
    timeout_s: float = 20.0,
    refuse: str = "",
    is_idle: bool = False,
) -> StepExecutor:
    """Return an executor that runs fake ranks.

    Args:
        create: function that creates the executor.
        timeout_s: deadline of steps.
        refuse: message with which rank 1 refuses to start; empty: all ranks start.
        is_idle: whether steps compute nothing, so that only the plans' way is measured.
    """

    def run_here() -> StepExecutor:
        return WorkerExecutor(FakeRank(0, None).run)

    with tempfile.TemporaryDirectory(prefix="graftlm-", dir="/tmp") as folder:
        context = rank_context(
            num_ranks,
            Path(folder),
            f"{__name__}:create",
            {"refuse": refuse, "is_idle": is_idle},
            options=RankOptions(timeout_s=timeout_s, start_timeout_s=60.0),
            device="cpu",
            num_threads=1,
            run_here=run_here,
            on_stage=lambda stage: None,
            on_group=lambda group: None,
        )
        return create(context)
