"""The contract of an executor, which runs the steps of one replica on its ranks.

The scheduler plans steps for a group of ranks. Each rank has a part of the model. All ranks run the same plans in the
same order, and rank 0 returns the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import Field

from graftlm.contracts.provider import Options

if TYPE_CHECKING:
    from graftlm.errors import RankFailedError
    from graftlm.plan import StepPlan, StepResult

__all__ = [
    "ExecutorCapabilities",
    "ExecutorContext",
    "Outcome",
    "RankLaunch",
    "RankOptions",
    "RankProcesses",
    "StepExecutor",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Outcome(Protocol[T_co]):
    """The future result of a step or a call, with the methods of `Future` that the engine uses."""

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for at most `timeout` seconds; return the result, or raise the call's exception."""
        ...

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for at most `timeout` seconds; return the call's exception, or None."""
        ...


class StepExecutor(ABC):
    """Runs plans in the order in which they are submitted. One thread calls all methods.

    Invariants, each checked by `graftlm.testing.ExecutorConformance`:
        - Every plan runs once on every rank, in the order of `submit`. The outcome has the result of rank 0.
        - A plan may have a token mask that is filled or cancelled after `submit`. A step whose mask is cancelled ends,
          and its outcome raises.
        - `call` runs a function after all plans that were submitted before.
        - With several ranks: if a rank ends, raises, or misses the deadline, the group ends. All outcomes, and all
          later ones, then raise a `RankFailedError` that names the rank and the reason, and `failure` is this error.
        - After `close`, or after a failure, no process of a rank is left.
    """

    @abstractmethod
    def submit(self, plan: StepPlan) -> Outcome[StepResult]:
        """Start a step. If the step raises, the outcome has the exception."""

    @abstractmethod
    def call(self, function: Callable[[], T]) -> Outcome[T]:
        """Run a function between two steps, after all steps that were submitted before."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the submitted steps, then stop the executor."""

    @property
    def failure(self) -> RankFailedError | None:
        """The reason why the group of ranks has ended; None while it runs."""
        return None

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Set a function that is called from any thread when the group of ranks has ended."""


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """The process of one rank, as an executor starts it.

    Attributes:
        rank: index of the rank.
        command: the command line.
        environment: variables that are set in addition to those of this process.
        first_line: bytes for the standard input. The process ends when its standard input is closed.
    """

    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    first_line: bytes


class RankProcesses(ABC):
    """The processes of all ranks, which an executor has started. Any thread may call `ended`."""

    @abstractmethod
    def place(self, rank: int) -> str:
        """Return where a rank runs, such as "pid 4711"."""

    @abstractmethod
    def ended(self) -> Mapping[int, str]:
        """Return how processes ended, such as {1: "killed by SIGKILL"}. Must return within milliseconds."""

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the end of all processes, then kill the others. None is left."""


class RankOptions(Options):
    """Base class of the options of executors with several ranks."""

    timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="Maximum time in seconds for one step, and for each exchange between ranks. If a rank takes "
        "longer, all ranks of the replica are ended and started again.",
    )
    start_timeout_s: float = Field(
        default=1800.0,
        gt=0,
        le=86_400,
        description="Maximum time in seconds until all ranks have loaded their parts of the model.",
    )


@dataclass(frozen=True, slots=True)
class ExecutorCapabilities:
    """The features that an executor supports.

    Attributes:
        max_ranks: maximum number of ranks of a replica; None: any number.
    """

    max_ranks: int | None = None


@dataclass(frozen=True, slots=True)
class ExecutorContext:
    """The arguments of an executor's `create`. The function calls `run_here` or `run_on`, once.

    Attributes:
        launches: the process of each rank.
        run_here: function that returns the executor of a single rank in this process.
        run_on: function that connects to the processes of all ranks, waits until they are ready, and returns the
            executor that sends plans to them.
    """

    launches: tuple[RankLaunch, ...]
    run_here: Callable[[], StepExecutor]
    run_on: Callable[[RankProcesses], StepExecutor]
